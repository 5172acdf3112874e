"""SGLang Inflight: change a language model's weights while it is generating."""
