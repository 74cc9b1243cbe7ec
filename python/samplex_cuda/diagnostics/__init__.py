"""How good is a sampler for this head, and how many samples does it take? Numbers, a table, a plot, advice.

    diagnose        measures every candidate sampler on rows of a trained or training head
    Diagnosis       what it found: `table()`, `plot(path)`, `as_dict()`, `recommendation`, `warnings`
    SamplerResult, Point      one sampler; one sampler with one number of samples
    leak            the share of the softmax that draws cannot push down, row by row
    Candidate       a sampler with the way it is drawn from: per row, shared, stratified

See docs/diagnostics.md.
"""

from samplex_cuda.diagnostics.candidates import Candidate, default_candidates, other_ways
from samplex_cuda.diagnostics.report import Diagnosis, Point, SamplerResult
from samplex_cuda.diagnostics.run import diagnose
from samplex_cuda.heads.leak import leak

__all__ = ["Candidate", "Diagnosis", "Point", "SamplerResult", "default_candidates", "diagnose", "leak", "other_ways"]
