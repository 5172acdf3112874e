"""SGLang's HTTP app for tokenizer workers of a server that runs without us.

Such a worker process imports its app by name and loads no plugins. This module is the app's name:
SGLang's app, with the reason on our routes.
"""

import os

from sglang.srt.entrypoints.http_server import app as app

from sglang_inflight.frontend.http import inactive
from sglang_inflight.inactive import OF_WORKERS

inactive.mount(app, os.environ[OF_WORKERS])
