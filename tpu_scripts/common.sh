# Shared by the scripts of this folder: commands that a dry run prints in place of running them, and errors that say what is missing.
# shellcheck shell=bash

DRY_RUN=${DRY_RUN:-0}

fail() {
  echo "error: $*" >&2
  exit 2
}

# Runs a command; in a dry run prints it, quoted so that it can be pasted.
run() {
  if [[ $DRY_RUN == 1 ]]; then
    printf '+'
    printf ' %q' "$@"
    printf '\n'
  else
    "$@"
  fi
}

# need ACTION name...: every name is a variable that an option --name sets.
need() {
  local _action=$1 _name _missing=() # underscores: an option may be called name
  shift
  for _name in "$@"; do
    [[ -n ${!_name:-} ]] || _missing+=("--$_name=")
  done
  [[ ${#_missing[@]} == 0 ]] || fail "$_action needs ${_missing[*]} (see --help)"
}

# The commands that must be installed; a dry run needs none.
have() {
  local tool
  [[ $DRY_RUN != 1 ]] || return 0
  for tool in "$@"; do
    command -v "$tool" >/dev/null || fail "$tool is not installed, or not on the PATH"
  done
}

# parse "known options" arguments...: sets a variable per --name=value, ACTION, DRY_RUN and, after --, the array FLAGS.
parse() {
  local _known=" $1 " _arg _name
  shift
  ACTION="" FLAGS=()
  while [[ $# -gt 0 ]]; do
    _arg=$1
    shift
    case $_arg in
      --help | -h) usage && exit 0 ;;
      --dry_run) DRY_RUN=1 ;;
      --)
        # shellcheck disable=SC2034  # the scripts read it
        FLAGS=("$@")
        return
        ;;
      --*=*)
        _name=${_arg%%=*}
        _name=${_name#--}
        [[ $_known == *" $_name "* ]] || fail "unknown option --$_name; there are:$_known"
        printf -v "$_name" '%s' "${_arg#*=}"
        ;;
      --*)
        _name=${_arg#--}
        [[ $_known == *" $_name? "* ]] || fail "unknown option $_arg; there are:$_known(see --help)"
        printf -v "$_name" '%s' 1
        ;;
      *)
        [[ -z $ACTION ]] || fail "one action at a time, not $ACTION and $_arg"
        ACTION=$_arg
        ;;
    esac
  done
}

# The arguments as one shell command.
quoted() {
  printf '%q ' "$@" | sed 's/ $//'
}
