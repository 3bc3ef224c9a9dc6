# Sourced by the scripts that run tests in an environment of their own; they set $venv, its directory, before.

torch="torch==2.13.0"

# The packages of this workspace, editable: workspace EXTRAS
workspace() {
    echo "-e packages/penstock[$1]"
    for package in packages/penstock-*; do echo "-e $package"; done
}

# Install packages into $venv.
install() {
    "${PYTHON:-python3}" scripts/install.py "$venv" "$@"
}

# Install the CPU build of torch where pip can find one; the ordinary one runs as well, only larger.
install_torch() {
    install "$torch+cpu" || install "$torch"
}

# Build $venv by a function, unless it was built for the same text: build_once TEXT FUNCTION
build_once() {
    if [ -f "$venv/.ready" ] && [ "$(cat "$venv/.ready")" = "$1" ]; then
        return
    fi
    echo "building $venv (once)" >&2
    "${PYTHON:-python3}" -m venv "$venv"
    "$2"
    echo "$1" > "$venv/.ready"
}
