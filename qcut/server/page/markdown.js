"use strict";
// Markdown as DOM nodes: CommonMark's blocks and emphasis, GitHub's tables and struck text. HTML stays text.

const DEEPEST = 12;  // lists and quotes inside one another; deeper ones are text
const MOST_MARKS = 400, LONGEST_MARK = 10;  // runs of emphasis in a paragraph; further and longer ones are text

/** An element with a class and children, or lists of children; strings become text. */
function make(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  for (const child of children.flat(Infinity)) element.append(child);
  return element;
}

const BLANK = /^\s*$/;
const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*([^\s`]{0,40})/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const UNDERLINE = /^ {0,3}(={2,}|-{2,})[ \t]*$/;  // one dash is an item whose text has not come yet
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(?=\S)|\s*$)/;
const DIVIDER = /^ {0,3}\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const TASK = /^\[([ xX])\] +(?=\S)/;

const indent = line => line.length - line.trimStart().length;
const outdent = (line, most) => line.slice(Math.min(most, indent(line)));

/** The marker of a list's item: how far it and its text are indented, its kind, and the number it begins with. */
function item(line) {
  const found = ITEM.exec(line);
  if (!found || RULE.test(line)) return null;
  const [whole, before, marker, after] = found;
  const space = after === undefined || after.length > 4 ? 1 : after.length;
  return {
    at: before.length, offset: before.length + marker.length + space, kind: marker.at(-1),
    number: marker.length > 1 ? parseInt(marker) : null, isEmpty: whole.length === line.length,
  };
}

function cells(line) {
  const found = [""];
  for (const part of line.trim().replace(/^\|/, "").match(/\\\||\||\\|[^\\|]+/g) ?? []) {
    if (part === "|") found.push("");
    else found[found.length - 1] += part === "\\|" ? "|" : part;
  }
  if (found.length > 1 && BLANK.test(found.at(-1))) found.pop();
  return found.map(cell => cell.trim());
}

const isTable = (lines, i) => lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].length < 1000
  && DIVIDER.test(lines[i + 1]) && cells(lines[i]).length === cells(lines[i + 1]).length;

/** Whether a line ends the paragraph before it. */
function begins(lines, i) {
  const line = lines[i];
  if (FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line) || isTable(lines, i)) return true;
  const found = item(line);
  return found !== null && found.at < 4 && !found.isEmpty && (found.number === null || found.number === 1);
}

/** Whether a line closes a fenced block. */
const closesFence = (line, mark) =>
  line.trim().length >= mark.length && indent(line) < 4 && line.trim() === mark[0].repeat(line.trim().length);

/** The line after what a quote or an item takes: its own lines, and those that go on with its last paragraph. */
function bodyEnd(lines, i, text, own) {
  let fence = FENCE.exec(text)?.[2] ?? null, isText = !BLANK.test(text);  // whether the line before is text
  while (++i < lines.length) {
    const inner = own(lines[i]);
    if (inner === null && (fence || !isText || BLANK.test(lines[i]) || begins(lines, i) || item(lines[i]))) break;
    isText = !BLANK.test(inner ?? lines[i]);
    if (inner === null) continue;
    if (fence === null) fence = FENCE.exec(inner)?.[2] ?? null;
    else if (closesFence(inner, fence)) fence = null;
  }
  return i;
}

/** The items of a list that begins at line i, and the line after it. */
function list(lines, i) {
  const first = item(lines[i]), items = [];
  let isLoose = false;
  for (let found = first; found && found.kind === first.kind && found.at < first.at + 4; ) {
    const {at, offset} = found;
    // Models indent what belongs to an item by two columns, where its text stands at the third.
    const own = line => BLANK.test(line) ? "" : indent(line) >= Math.min(offset, at + 2) ? outdent(line, offset) : null;
    const text = lines[i].slice(offset), end = bodyEnd(lines, i, text, own);
    const body = [text].concat(lines.slice(i + 1, end).map(line => own(line) ?? line.trim()));
    while (body.length > 1 && !body.at(-1)) body.pop();
    items.push(body);
    i = end;
    found = i < lines.length ? item(lines[i]) : null;
    if (found && found.kind === first.kind && BLANK.test(lines[i - 1])) isLoose = true;
  }
  return {number: first.number, items, isLoose, end: i};
}

/** The blocks of some lines, each with the number of its first line. */
function blocks(given, depth = 0) {
  const found = [];
  const lines = given.map(line => line.replace(/^[ \t]+/, space => space.replaceAll("\t", "    ")));
  for (let i = 0, end; i < lines.length; i = end) {
    const line = lines[i], first = i, add = block => found.push({first, depth, ...block});
    end = i + 1;
    if (BLANK.test(line)) continue;
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (fence) {
      while (end < lines.length && !closesFence(lines[end], fence[2])) end++;
      const code = given.slice(i + 1, end).map(text => outdent(text, fence[1].length));
      add({kind: "code", language: fence[3], text: code.join("\n")});
      end++;
    } else if (heading) {
      let text = line.trim().slice(heading[1].length).trim(), last = text.length;
      while (last && text[last - 1] === "#") last--;
      if (!last || /\s/.test(text[last - 1])) text = text.slice(0, last).trim();
      add({kind: `h${heading[1].length}`, text});
    } else if (RULE.test(line)) add({kind: "hr"});
    else if (QUOTE.test(line) && depth < DEEPEST) {
      const own = text => QUOTE.test(text) ? text.replace(QUOTE, "") : null;
      end = bodyEnd(lines, i, own(line), own);
      add({kind: "quote", lines: lines.slice(i, end).map(text => own(text) ?? text)});
    } else if (item(line) && item(line).at < 4 && depth < DEEPEST) {
      const {end: after, ...rest} = list(lines, i);
      end = after;
      add({kind: "list", ...rest});
    } else if (isTable(lines, i)) {
      end = i + 2;
      while (end < lines.length && !BLANK.test(lines[end]) && !begins(lines, end)) end++;
      add({kind: "table", head: cells(line), aligned: cells(lines[i + 1]), rows: lines.slice(i + 2, end).map(cells)});
    } else if (indent(line) >= 4) {
      while (end < lines.length && (BLANK.test(lines[end]) || indent(lines[end]) >= 4)) end++;
      add({kind: "code", language: "", text: lines.slice(i, end).map(text => outdent(text, 4)).join("\n").trimEnd()});
    } else {
      while (end < lines.length && !BLANK.test(lines[end]) && !UNDERLINE.test(lines[end]) && !begins(lines, end)) end++;
      const text = lines.slice(i, end).map(part => part.trimStart()).join("\n").trimEnd();
      const under = end < lines.length ? UNDERLINE.exec(lines[end]) : null;
      if (under) end++;
      add({kind: under ? under[1][0] === "=" ? "h1" : "h2" : "p", text});
    }
  }
  return found;
}

function codeBlock(language, text) {
  const copy = make("button", "copy", "Copy");
  copy.type = "button";
  const code = make("pre", "", make("code", "", text));
  code.tabIndex = 0;
  return make("div", "code", make("div", "bar", make("span", "", language || "text"), copy), code);
}

function listNode(block) {
  const whole = make(block.number === null ? "ul" : "ol");
  if (block.number !== null && block.number !== 1) whole.start = block.number;
  for (const body of block.items) {
    const task = TASK.exec(body[0]);
    if (task) body[0] = body[0].slice(task[0].length);
    const inside = blocks(body, block.depth + 1);
    const isLoose = block.isLoose || inside.some(({first}) => first > 0 && BLANK.test(body[first - 1]));
    const parts = inside.map(part => part.kind === "p" && !isLoose ? inline(part.text) : blockNode(part));
    const entry = make("li", "", parts);
    if (task) {
      const box = make("input");
      Object.assign(box, {type: "checkbox", disabled: true, checked: task[1] !== " "});
      entry.prepend(box, " ");
      entry.className = "task";
    }
    whole.append(entry);
  }
  return whole;
}

function tableNode(block) {
  const sides = block.aligned.map(text => `${text[0] === ":" ? "l" : ""}${text.at(-1) === ":" ? "r" : ""}`);
  // A short row stays short: many of them under a wide head are no reason for millions of cells.
  const row = (tag, texts) => make("tr", "", texts.slice(0, sides.length).map((text, i) => {
    const cell = make(tag, {r: "right", lr: "middle"}[sides[i]] ?? "", inline(text));
    if (tag === "th") cell.scope = "col";
    return cell;
  }));
  const body = make("tbody", "", block.rows.map(texts => row("td", texts)));
  const whole = make("div", "table", make("table", "", make("thead", "", row("th", block.head)), body));
  whole.tabIndex = 0;
  return whole;
}

/** The element of a block. */
function blockNode(block) {
  switch (block.kind) {
    case "code": return codeBlock(block.language, block.text);
    case "hr": return make("hr");
    case "quote": return make("blockquote", "", blocks(block.lines, block.depth + 1).map(blockNode));
    case "list": return listNode(block);
    case "table": return tableNode(block);
    default: return make(block.kind, "", inline(block.text));
  }
}

const SPECIAL = new RegExp([
  /\\[!-\/:-@[-`{-~\n]/, /`+/, /!?\[/, /\]/, /\*+/, /_+/, /~~/, /<https?:\/\/[^\s<>]{1,2000}>/, /<br {0,3}\/?>/,
  /https?:\/\/[^\s<>[\]`|"]{1,2000}/, /&(?:#\d{1,7}|#x[\da-f]{1,6}|amp|lt|gt|quot|apos|nbsp);/, /\n/,
].map(one => one.source).join("|"), "gi");
const ADDRESS = /<([^<>\n]{1,2000})>|([^\s()<>]{1,2000}(?:\([^\s()]{0,500}\)[^\s()]{0,500}){0,9})/;
const TITLE = /"[^"]{0,500}"|'[^']{0,500}'/;
const TARGET = new RegExp(`\\(\\s{0,9}(?:${ADDRESS.source})(?:\\s{1,9}(?:${TITLE.source}))?\\s{0,9}\\)`, "y");
const NAMED = {amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0"};
const MARKUP = /[\p{P}\p{S}]/u;

function character(entity) {
  if (entity[0] !== "#") return NAMED[entity.toLowerCase()] ?? `&${entity};`;
  const point = /x/i.test(entity[1]) ? parseInt(entity.slice(2), 16) : parseInt(entity.slice(1));
  return point > 0 && point <= 0x10ffff && (point < 0xd800 || point > 0xdfff) ? String.fromCodePoint(point) : "\ufffd";
}

/** A link to a page of the web; null: the address is none. */
function link(address, ...children) {
  if (!/^https?:\/\//i.test(address) || !URL.canParse(address)) return null;
  const found = make("a", "", children);
  Object.assign(found, {href: address, target: "_blank", rel: "noopener noreferrer"});
  for (const inner of found.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  return found;
}

const nodes = items => items.map(one => one.mark ? one.mark.repeat(one.count) : one);

/** Make elements of the pairs of marks from an index on. */
function pair(items, from) {
  for (let close = from; close < items.length; close++) {
    const end = items[close];
    if (!end.closes || !end.count) continue;
    let open = close - 1;
    for (; open >= from; open--) {
      const start = items[open];
      if (start.mark !== end.mark || !start.opens || !start.count) continue;
      const isOdd = (start.closes || end.opens) && (start.length + end.length) % 3 === 0;
      if (end.mark === "~" || !isOdd || (start.length % 3 === 0 && end.length % 3 === 0)) break;
    }
    if (open < from) continue;
    const start = items[open], size = Math.min(2, start.count, end.count);
    const tag = end.mark === "~" ? "del" : size === 2 ? "strong" : "em";
    items.splice(open + 1, close - open - 1, make(tag, "", nodes(items.slice(open + 1, close))));
    start.count -= size;
    end.count -= size;
    close = open + (end.count ? 1 : 2);
  }
}

/** A paragraph's text as nodes. */
function inline(text) {
  const items = [], brackets = [], lonely = new Set(), special = new RegExp(SPECIAL);
  let at = 0, marks = 0;
  const plain = (value) => value && items.push(document.createTextNode(value));
  for (let found; (found = special.exec(text)); at = special.lastIndex) {
    const token = found[0], kind = token[0];
    let before = text.slice(at, found.index);
    if (token === "\n") {
      const isHard = before.endsWith("  ");
      plain(before.trimEnd());
      items.push(isHard ? make("br") : document.createTextNode("\n"));
      continue;
    }
    plain(before);
    if (token === "\\\n" || /^<br/i.test(token)) items.push(make("br"));
    else if (kind === "\\") plain(token[1]);
    else if (kind === "&") plain(character(token.slice(1, -1)));
    else if (kind === "`") {
      let end = lonely.has(token.length) ? -1 : special.lastIndex;
      while (end >= 0 && (end = text.indexOf(token, end)) >= 0) {
        let after = end;
        while (text[after] === "`") after++;
        if (after - end === token.length) break;
        end = after;
      }
      if (end < 0) {
        lonely.add(token.length);
        plain(token);
        continue;
      }
      const code = text.slice(special.lastIndex, end).replaceAll("\n", " ");
      const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
      items.push(make("code", "", isPadded ? code.slice(1, -1) : code));
      special.lastIndex = end + token.length;
    } else if (kind === "[" || kind === "!") {
      plain(token);
      brackets.push({index: items.length - 1, isImage: kind === "!"});
    } else if (kind === "]") {
      const bracket = brackets.pop();
      TARGET.lastIndex = special.lastIndex;
      const target = bracket && TARGET.exec(text);
      const address = target && (target[1] ?? target[2]);
      if (!target || !link(address)) {
        plain(token);
        continue;
      }
      pair(items, bracket.index + 1);
      const inside = nodes(items.splice(bracket.index)).slice(1);
      const label = inside.length ? inside : address;
      items.push(link(address, bracket.isImage ? "Image: " : "", label));
      special.lastIndex = TARGET.lastIndex;
    } else if (kind === "<") items.push(link(token.slice(1, -1), token.slice(1, -1)) ?? token);
    else if (/^h/i.test(kind)) {
      let address = token.replace(/[.,;:!?'*_~]{1,9}$/, "");
      const over = () => address.endsWith(")") && address.split(")").length > address.split("(").length;
      while (over()) address = address.slice(0, -1);
      items.push(link(address, address) ?? address);
      special.lastIndex = found.index + address.length;
    } else if (marks < MOST_MARKS && token.length < LONGEST_MARK) {
      marks++;
      const left = text[found.index - 1] ?? " ", right = text[special.lastIndex] ?? " ";
      const opens = !/\s/.test(right) && (!MARKUP.test(right) || /\s/.test(left) || MARKUP.test(left));
      const closes = !/\s/.test(left) && (!MARKUP.test(left) || /\s/.test(right) || MARKUP.test(right));
      const isFree = kind !== "_";  // within a word, too
      items.push({
        mark: kind, count: token.length, length: token.length,
        opens: opens && (isFree || !closes || MARKUP.test(left)),
        closes: closes && (isFree || !opens || MARKUP.test(right)),
      });
    } else plain(token);
  }
  plain(text.slice(at));
  pair(items, 0);
  const whole = document.createDocumentFragment();
  for (const one of nodes(items)) whole.append(one);
  whole.normalize();
  return whole;
}

/** Markdown that grows in an element. Blocks that can no longer change are left as they are. */
class Growing {
  constructor(place) {
    this.place = place;
    this.settled = this.kept = 0;  // characters and elements of these blocks
  }

  /** Show a text that begins with the one shown before. */
  show(text) {
    const lines = text.slice(this.settled).split("\n"), found = blocks(lines);
    while (this.place.childNodes.length > this.kept) this.place.lastChild.remove();
    for (const block of found) this.place.append(blockNode(block));
    // A block is closed where the next one begins, which takes up to two whole lines to see.
    let open = Math.max(0, found.length - 1);
    while (open > 0 && found[open].first >= lines.length - 2) open--;
    if (open === 0) return;
    this.kept += open;
    for (const line of lines.slice(0, found[open].first)) this.settled += line.length + 1;
  }
}
