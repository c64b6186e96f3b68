"""Two devices of one host, two ranks: their links, shards with experts, tensor parallel, a pipeline; each with and without backhaul."""
