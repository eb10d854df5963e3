#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# make.sh - writes all golden vectors anew, next to itself: small files of inputs and float64
# results that the tests read without Python. delta_* come from the oracle, layer_* from the
# formulas in make_layers.py. The same seeds give the same files.
set -e
cd "$(dirname "$0")"
python=${PYTHON:-/usr/bin/python3}

delta() { # file, arguments
    name=$1
    shift
    "$python" ../delta_rule_oracle.py vectors "$@" --float32-inputs -o "delta_$name.bin"
}

delta gdn gdn --T 37 --H 1 --HV 2 --K 6 --V 5 --seed 1
delta kda kda --T 37 --H 1 --HV 2 --K 6 --V 5 --seed 2
delta gdn_packed gdn --T 40 --offsets 0,1,17,33,40 --H 2 --HV 2 --K 5 --V 4 --seed 3
delta kda_packed kda --T 40 --offsets 0,1,17,33,40 --H 2 --HV 2 --K 4 --V 5 --seed 4
delta gdn_strong gdn --T 35 --H 1 --HV 3 --K 4 --V 6 --decay 40 --seed 5
delta kda_strong kda --T 35 --H 1 --HV 3 --K 4 --V 6 --decay 40 --seed 6
delta kda_plain kda --T 33 --H 1 --HV 1 --K 8 --V 8 --no-state --scale 1 --seed 7
delta gdn_weak gdn --T 66 --H 1 --HV 1 --K 4 --V 4 --decay 1e-4 --seed 8
"$python" make_layers.py .
