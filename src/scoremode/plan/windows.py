"""The types of an engine's input and output, under the module name that engines of other packages import."""

from scoremode.scores.answers import Answers, Window, WindowList, WindowSource, measured, prescribed_batches

__all__ = ["Answers", "Window", "WindowList", "WindowSource", "measured", "prescribed_batches"]
