"""Suffix decoding: an index of all that a text has said (`index`) and a memory of earlier texts (`store`)."""
