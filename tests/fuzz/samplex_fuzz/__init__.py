"""Random calls of every op and public function, with guard pages around the inputs and the reference as oracle."""
