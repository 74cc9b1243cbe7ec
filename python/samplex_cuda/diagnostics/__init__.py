"""How good is a sampler for this head, and how many samples does it take? Numbers, a table, a plot, advice.

    diagnose        measures every candidate sampler on rows of a trained or training head
    Diagnosis       what it found: `table()`, `plot(path)`, `as_dict()`, `recommendation`, `warnings`
    Law, Point      one sampler; one sampler with one number of samples

See docs/diagnostics.md.
"""

from samplex_cuda.diagnostics.report import Diagnosis, Law, Point
from samplex_cuda.diagnostics.run import default_candidates, diagnose

__all__ = ["Diagnosis", "Law", "Point", "default_candidates", "diagnose"]
