# A server with the package. The default serves on a CPU. For GPUs take SGLang's own image:
#   docker build --build-arg BASE=lmsysorg/sglang:v0.5.23 --tag inflight .
#   docker run --gpus all --publish 30000:30000 inflight --model-path MODEL
ARG BASE=python:3.12-slim
FROM ${BASE}

# some images mark their Python as the system's
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /inflight
COPY . .
# the tools serve on a CPU, and have the doctor
RUN python3 -m pip install --no-cache-dir --prefer-binary ./client . ./tools

EXPOSE 30000
# the model and further flags follow: docker run … inflight --model-path MODEL
ENTRYPOINT ["sglang", "serve", "--host", "0.0.0.0", "--port", "30000"]
