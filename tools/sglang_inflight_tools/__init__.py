"""Tools around a server of SGLang Inflight, which a server itself does not need."""
