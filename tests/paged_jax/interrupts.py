"""Ctrl-C at a chosen line of a step."""

import sys

LAST_LINES = {"step", "_hand_out"}
"""Where outputs are on their way to the caller: there they can get lost, as in the caller's own next line."""


class InterruptAtLine:
    """Raises KeyboardInterrupt at the line of that number of what an engine's steps run in these files."""

    def __init__(self, engine, number, files):
        self.left, self.files = number, files
        self.step, engine._step = engine._step, self

    def __call__(self):
        tracer = sys.gettrace()
        sys.settrace(self.trace_call)
        try:
            return self.step()
        finally:
            sys.settrace(tracer)

    def trace_call(self, frame, *_):
        code = frame.f_code
        return self.trace if code.co_filename in self.files and code.co_name not in LAST_LINES else None

    def trace(self, frame, event, arg):
        self.left -= event == "line"
        if self.left == 0:
            raise KeyboardInterrupt
        return self.trace
