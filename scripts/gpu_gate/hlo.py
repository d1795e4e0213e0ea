"""Reads a compiled program's text: which arrays its steps write, and what else the host would notice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16}
_NO_BUFFER = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional", "call",
    "fusion-start", "copy-start", "async-start",  # counted at the matching -done
}  # fmt: skip
_IN_PLACE = re.compile("scatter|dynamic[-_]update[-_]slice")
_HOST = {"send", "send-done", "recv", "recv-done", "infeed", "outfeed"}
_HOST_TARGET = re.compile("host|callback", re.IGNORECASE)
_CONTROL = {"while", "conditional"}


class Op(NamedTuple):
    """One scheduled instruction: `shape` as the text has it, `target` of a custom call."""

    computation: str
    name: str
    shape: str
    opcode: str
    target: str
    text: str

    @property
    def num_bytes(self) -> int:
        """What its result takes."""
        return shape_bytes(self.shape)

    @property
    def in_place(self) -> bool:
        """Whether it writes into an operand's own buffer: a scatter, an update, an aliasing custom call."""
        return bool(_IN_PLACE.search(self.name) or _IN_PLACE.search(self.opcode)) or (
            self.opcode == "custom-call" and "output_to_operand_aliasing" in self.text
        )


def shape_bytes(shape: str) -> int:
    """Bytes of `bf16[4,8]{1,0}`, or of a tuple of such."""
    total = 0
    for kind, dims in re.findall(r"\b([a-z]+[0-9][a-z0-9]*|pred)\[([\d,]*)\]", shape):
        digits = re.match(r"[a-z]+(\d+)", kind)
        bits = _ITEM_BITS.get(kind) or (int(digits[1]) if digits else 0)
        for dim in filter(None, dims.split(",")):
            bits *= int(dim)
        total += bits // 8
    return total


def scheduled_ops(text: str) -> Iterator[Op]:
    """What runs in sequence: the entry's instructions and those of loops and branches, no fusion's."""
    kept = set(re.findall(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE))
    called = r"\b(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    kept |= set(re.findall(called, "\n".join(_control_lines(text))))
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", text):
        kept |= {name.strip(" %") for name in branches.split(",")}
    computation = ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = header[1]
        elif computation in kept and (
            op := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        ):
            target = re.search(r'custom_call_target="([^"]+)"', line)
            yield Op(computation, op[1], op[2], op[3], target[1] if target else "", line)


def _control_lines(text: str) -> list[str]:
    """Lines that hand the control to another computation as a whole; command buffers are calls."""
    return [line for line in text.splitlines() if re.search(r" (?:while|conditional|call)\(", line)]


def pool_sized(ops: list[Op], pool_bytes: int) -> list[Op]:
    """Instructions that make a new array of a layer pool's size or more."""
    return [
        op for op in ops if op.opcode not in _NO_BUFFER and not op.in_place and op.num_bytes >= pool_bytes
    ]


def control_flow(ops: list[Op]) -> list[Op]:
    """Loops and branches: what a CUDA graph does not capture by default."""
    return [op for op in ops if op.opcode in _CONTROL]


def host_transfers(ops: list[Op]) -> list[Op]:
    """Instructions that move data between the device and the host, or call back into it."""
    return [op for op in ops if op.opcode in _HOST or _HOST_TARGET.search(op.target) or "S(5)" in op.shape]
