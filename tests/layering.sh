#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Holds every #include "..." of src/ and tools/ against the folders it may look into (DESIGN.md,
# "Dependency direction"). Prints each offence; fails if there is one.
cd "$1" || exit 2
allow() { # folder, allowed prefixes as an extended regular expression
    bad=$(grep -nE '^#include "' -r "$1" | grep -vE ":#include \"($2)" || true)
    [ -z "$bad" ] || { echo "$bad"; status=1; }
}
status=0
allow src/base  'base/'
allow src/plan  'base/|plan/'
allow src/core  'base/|plan/|backend.h|core/'
allow src/ref   'base/|plan/|backend.h|ref/'
allow src/cpu   'base/|plan/|backend.h|cpu/'
allow src/io    'base/|io/'
allow src/comm  'base/'
allow src/cp    'base/|plan/|backend.h|core/|cp/'
allow src/mpi   'mpi/'
allow src/layer 'base/|plan/|core/|io/|layer/'
allow tools     '[a-z_]+\.h"'
# Only the public headers reach the tools and the installed headers each other.
bad=$(grep -nE '#include "' include/deltarule/*.h | grep -vE '"(deltarule|ops|comm)\.h"')
[ -z "$bad" ] || { echo "$bad"; status=1; }
bad=$(grep -nE '#include <deltarule/' -r tools | grep -vE '<deltarule/(deltarule|ops|cp|comm|layer|weights)\.h>')
[ -z "$bad" ] || { echo "$bad"; status=1; }
exit $status
