# An API pod: the protocol and HTTP, no torch. Built from the repository's root:
#   docker build -f deploy/api.Dockerfile -t millstream-api .

# Any image with Python >= 3.11 with venv, and a Debian-like userland.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# Further arguments of pip, for example of another index.
ARG PIP_ARGS=""
WORKDIR /src
# What changes seldom comes first: an edit of the source does not fetch the dependencies again.
COPY pyproject.toml README.md LICENSE ./
COPY requirements/constraints.txt requirements/
RUN python3 -m venv /opt/venv \
 && mkdir -p src/millstream && touch src/millstream/__init__.py \
 && /opt/venv/bin/pip install --no-cache-dir ${PIP_ARGS} -c requirements/constraints.txt ".[api,otel]"
COPY src src
RUN /opt/venv/bin/pip install --no-cache-dir ${PIP_ARGS} --no-deps --force-reinstall . \
 && /opt/venv/bin/pip uninstall --yes pip

FROM ${BASE}
RUN groupadd --gid 10001 millstream \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent \
      --shell /usr/sbin/nologin millstream
# In a container, the address that only the container itself reaches is no default.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MILLSTREAM_HOST=0.0.0.0
WORKDIR /
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=30s \
  CMD ["python", "/opt/millstream/healthcheck.py", "api"]
ENTRYPOINT ["millstream"]
CMD ["api"]
COPY deploy/healthcheck.py /opt/millstream/healthcheck.py
USER 10001:10001
# The large one after all else that seldom changes.
COPY --from=build /opt/venv /opt/venv
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="millstream-api" \
      org.opencontainers.image.description="API pod of a Millstream fleet" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
