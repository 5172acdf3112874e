"""A table of model classes: each class of SGLang, by the effect of an update on a small one."""
