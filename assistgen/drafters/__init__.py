"""Who guesses. `base` has the contract; `ngram` a drafter; `candidates` the bridge to transformers' `CandidateGenerator`."""
