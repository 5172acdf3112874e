"""SGLang's HTTP app as a further tokenizer worker serves it, where the server runs without us.

Such a worker is a process that imports the app by name and loads no plugins. It is named this
one instead, which is the same with what we have to say of it.
"""

import os

from sglang.srt.entrypoints.http_server import app as app

from sglang_inflight.frontend.http import inactive
from sglang_inflight.inactive import OF_WORKERS

inactive.mount(app, os.environ[OF_WORKERS])
