// Greedy float32 decoding of a llama2.c checkpoint (version 0) on the CPU: the plain program with which
// benchmarks/compare.py compares qcut.Engine. qcut/checkpoints/formats/llama2c/files.py describes the file.
//
//     g++ -std=c++17 -O3 -march=native -fopenmp cpu_llama.cpp -o cpu_llama
//     ./cpu_llama FILE NEW_TOKENS ID...
//
// Prints "tokens" and the new ids; then "tokens_s" and the rate of all new tokens but the first, whose step reads the
// prompt's last token; then "threads" and their number. Exits with 1 and a line on stderr if the file or an id is
// wrong.

#include <omp.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr float kTheta = 10000.0f, kEps = 1e-5f;

struct Shape {
  int64_t dim, hidden, layers, heads, kv_heads, vocabulary, context;
  bool tied;

  int64_t head() const { return dim / heads; }
  int64_t kv() const { return kv_heads * head(); }
};

/// The tensors of the file. A tensor of all layers holds one layer after the other.
struct Weights {
  const float *embedding, *attention_norm, *wq, *wk, *wv, *wo, *mlp_norm, *gate, *down, *up, *norm, *classifier;
};

struct Checkpoint {
  Shape shape;
  std::vector<float> values;
  Weights weights;
};

Shape read_shape(std::istream& file) {
  std::array<int32_t, 7> header;
  if (!file.read(reinterpret_cast<char*>(header.data()), sizeof header)) throw std::runtime_error("no header");
  const int64_t vocabulary = header[5];
  const Shape s{header[0], header[1], header[2], header[3], header[4], std::abs(vocabulary), header[6], vocabulary > 0};
  // The limit keeps every size below within 64 bits.
  for (int64_t size : {s.dim, s.hidden, s.layers, s.heads, s.kv_heads, s.vocabulary, s.context})
    if (size < 1 || size > 1 << 19) throw std::runtime_error("a size of the header is " + std::to_string(size));
  if (s.dim % s.heads || s.heads % s.kv_heads || s.head() % 2)
    throw std::runtime_error("the header's heads do not divide its sizes");
  return s;
}

Checkpoint read_checkpoint(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot be opened");
  Checkpoint c;
  c.shape = read_shape(file);
  const Shape& s = c.shape;

  const float* Weights::*fields[] = {&Weights::embedding, &Weights::attention_norm, &Weights::wq,   &Weights::wk,
                                     &Weights::wv,        &Weights::wo,             &Weights::mlp_norm,
                                     &Weights::gate,      &Weights::down,           &Weights::up,   &Weights::norm,
                                     nullptr,             &Weights::classifier};
  const int64_t table = s.vocabulary * s.dim;
  const int64_t sizes[] = {table,
                           s.layers * s.dim,
                           s.layers * s.dim * s.dim,
                           s.layers * s.kv() * s.dim,
                           s.layers * s.kv() * s.dim,
                           s.layers * s.dim * s.dim,
                           s.layers * s.dim,
                           s.layers * s.hidden * s.dim,
                           s.layers * s.dim * s.hidden,
                           s.layers * s.hidden * s.dim,
                           s.dim,
                           s.context * s.head(),  // cosines and sines, which are not used
                           s.tied ? 0 : table};
  int64_t count = 0;
  for (int64_t size : sizes) count += size;
  const auto start = file.tellg();
  file.seekg(0, std::ios::end);
  const int64_t found = file.tellg() - start, wanted = count * static_cast<int64_t>(sizeof(float));
  if (found != wanted)
    throw std::runtime_error(std::to_string(found) + " bytes of weights; the header asks for " + std::to_string(wanted));
  file.seekg(start);
  c.values.resize(count);
  if (!file.read(reinterpret_cast<char*>(c.values.data()), wanted)) throw std::runtime_error("cannot be read");

  const float* next = c.values.data();
  for (size_t i = 0; i < std::size(sizes); next += sizes[i++])
    if (fields[i]) c.weights.*fields[i] = next;
  if (s.tied) c.weights.classifier = c.weights.embedding;
  return c;
}

/// y[rows] = w[rows, columns] x[columns]
void multiply(float* y, const float* w, const float* x, int64_t rows, int64_t columns) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = w + i * columns;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < columns; ++j) sum += row[j] * x[j];
    y[i] = sum;
  }
}

void rms_norm(float* y, const float* x, const float* gain, int64_t n) {
  float squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
  const float scale = 1 / std::sqrt(squares / n + kEps);
  for (int64_t i = 0; i < n; ++i) y[i] = gain[i] * (x[i] * scale);
}

/// Turns columns 2i and 2i + 1 of each head by position * theta^(-2i / head).
void rotate(float* x, int64_t heads, int64_t head, int64_t position) {
  for (int64_t i = 0; i < head; i += 2) {
    const float angle = position / std::pow(kTheta, static_cast<float>(i) / head);
    const float cosine = std::cos(angle), sine = std::sin(angle);
    for (float* pair = x + i; pair < x + heads * head; pair += head) {
      const float even = pair[0], odd = pair[1];
      pair[0] = even * cosine - odd * sine;
      pair[1] = even * sine + odd * cosine;
    }
  }
}

class Model {
 public:
  explicit Model(const Checkpoint& checkpoint) : s_(checkpoint.shape), w_(checkpoint.weights) {
    x_.resize(s_.dim);
    h_.resize(s_.dim);
    q_.resize(s_.dim);
    mixed_.resize(s_.dim);
    gate_.resize(s_.hidden);
    up_.resize(s_.hidden);
    logits_.resize(s_.vocabulary);
    scores_.resize(s_.heads * s_.context);
    keys_.resize(s_.layers * s_.context * s_.kv());
    values_.resize(s_.layers * s_.context * s_.kv());
  }

  /// Reads a token and returns the likeliest next token.
  int64_t step(int64_t token, int64_t position) {
    std::copy_n(w_.embedding + token * s_.dim, s_.dim, x_.data());
    for (int64_t layer = 0; layer < s_.layers; ++layer) {
      attend(layer, position);
      feed_forward(layer);
    }
    rms_norm(h_.data(), x_.data(), w_.norm, s_.dim);
    multiply(logits_.data(), w_.classifier, h_.data(), s_.vocabulary, s_.dim);
    return std::max_element(logits_.begin(), logits_.end()) - logits_.begin();
  }

 private:
  void attend(int64_t layer, int64_t position) {
    const int64_t dim = s_.dim, kv = s_.kv(), head = s_.head(), sharing = s_.heads / s_.kv_heads;
    float* keys = keys_.data() + layer * s_.context * kv;
    float* values = values_.data() + layer * s_.context * kv;
    rms_norm(h_.data(), x_.data(), w_.attention_norm + layer * dim, dim);
    multiply(q_.data(), w_.wq + layer * dim * dim, h_.data(), dim, dim);
    multiply(keys + position * kv, w_.wk + layer * kv * dim, h_.data(), kv, dim);
    multiply(values + position * kv, w_.wv + layer * kv * dim, h_.data(), kv, dim);
    rotate(q_.data(), s_.heads, head, position);
    rotate(keys + position * kv, s_.kv_heads, head, position);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s_.heads; ++i) {
      const float* q = q_.data() + i * head;
      const int64_t shared = i / sharing * head;
      float* scores = scores_.data() + i * s_.context;
      float largest = -INFINITY, total = 0;
      for (int64_t t = 0; t <= position; ++t) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < head; ++j) sum += q[j] * keys[t * kv + shared + j];
        scores[t] = sum / std::sqrt(static_cast<float>(head));
        largest = std::max(largest, scores[t]);
      }
      float* mixed = mixed_.data() + i * head;
      std::fill_n(mixed, head, 0.0f);
      for (int64_t t = 0; t <= position; ++t) {
        const float weight = std::exp(scores[t] - largest);
        total += weight;
        for (int64_t j = 0; j < head; ++j) mixed[j] += weight * values[t * kv + shared + j];
      }
      for (int64_t j = 0; j < head; ++j) mixed[j] /= total;
    }
    multiply(h_.data(), w_.wo + layer * dim * dim, mixed_.data(), dim, dim);
    for (int64_t i = 0; i < dim; ++i) x_[i] += h_[i];
  }

  void feed_forward(int64_t layer) {
    const int64_t dim = s_.dim, hidden = s_.hidden;
    rms_norm(h_.data(), x_.data(), w_.mlp_norm + layer * dim, dim);
    multiply(gate_.data(), w_.gate + layer * hidden * dim, h_.data(), hidden, dim);
    multiply(up_.data(), w_.up + layer * hidden * dim, h_.data(), hidden, dim);
    for (int64_t i = 0; i < hidden; ++i) gate_[i] *= up_[i] / (1 + std::exp(-gate_[i]));
    multiply(h_.data(), w_.down + layer * dim * hidden, gate_.data(), dim, hidden);
    for (int64_t i = 0; i < dim; ++i) x_[i] += h_[i];
  }

  const Shape s_;
  const Weights w_;
  std::vector<float> x_, h_, q_, mixed_, gate_, up_, logits_, scores_, keys_, values_;
};

int64_t number(std::string_view text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) throw std::runtime_error("not a number: " + std::string(text));
  return value;
}

void run(const std::string& path, int64_t wanted, const std::vector<int64_t>& prompt) {
  const Checkpoint checkpoint = read_checkpoint(path);
  const Shape& s = checkpoint.shape;
  for (int64_t id : prompt)
    if (id < 0 || id >= s.vocabulary) throw std::runtime_error("no token " + std::to_string(id));
  const int64_t length = prompt.size();
  if (wanted < 1 || length + wanted - 1 > s.context)  // the last token is not read
    throw std::runtime_error("new tokens and prompt exceed the context of " + std::to_string(s.context));

  Model model(checkpoint);
  std::vector<int64_t> tokens;
  int64_t next = 0;
  for (int64_t position = 0; position < length; ++position) next = model.step(prompt[position], position);
  tokens.push_back(next);
  const auto start = std::chrono::steady_clock::now();
  while (static_cast<int64_t>(tokens.size()) < wanted) {
    next = model.step(next, length + static_cast<int64_t>(tokens.size()) - 1);
    tokens.push_back(next);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;

  std::printf("tokens");
  for (int64_t token : tokens) std::printf(" %lld", static_cast<long long>(token));
  std::printf("\ntokens_s %.3f\nthreads %d\n", wanted > 1 ? (wanted - 1) / seconds.count() : 0.0, omp_get_max_threads());
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) {
    std::fprintf(stderr, "usage: %s FILE NEW_TOKENS ID...\n", arguments[0]);
    return 2;
  }
  try {
    std::vector<int64_t> prompt;
    for (int i = 3; i < count; ++i) prompt.push_back(number(arguments[i]));
    run(arguments[1], number(arguments[2]), prompt);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", arguments[1], error.what());
    return 1;
  }
  return 0;
}
