"""Who besides a layer itself depends on its weight, its class or a norm's output, found by reading code.

What a forward call may reach (`functions`) is read as syntax trees (`syntax`). A layer or norm is changed only where
everything that depends on it was seen; every other one stays in float and is reported with the reason.

Caught are, in methods, hooks, decorated and free functions, through aliases, loops, containers and helpers:

- reads of a weight or bias without a call of the layer, such as ``nn.MultiheadAttention``'s of ``out_proj``
  (`readers.layers_read`);
- code that depends on the class of a layer, such as ``isinstance(self.proj, nn.Linear)`` (`readers.class_checked`);
- reads of a norm's output in branches, loops and functions that no calibration batch ran (`norm_outputs`).

A branch that the module's plain attributes rule out, such as ``if self.config.pretraining_tp > 1``, does not count.
Attributes that describe a tensor, such as ``weight.dtype``, are no reads. A function of a compiled library is not
read: a quantized weight that reaches one raises an error (`qcut.models.guards.described`).
"""
