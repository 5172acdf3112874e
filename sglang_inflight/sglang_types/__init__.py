"""What of SGLang's objects we read, write or call, in any process.

Protocols, here and in the folders ``upstream`` of ``scheduler`` and ``frontend``: one for each
class of SGLang's that we touch, with the attributes and methods that we touch, by upstream's
names, and with upstream's types where these say anything. Our code is annotated with them and
never with SGLang's own classes, so that mypy refuses what is not named here. What is named here
is looked for in SGLang's source (``sglang_inflight.porting``): by a test, by ``doctor``, and by
``make port`` in an SGLang that is new.
"""
