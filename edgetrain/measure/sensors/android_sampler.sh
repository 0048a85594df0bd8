# What a phone's files hold, one line a sample, for edgetrain's android.py (which says what the lines mean).
# Usage: sh android_sampler.sh ROOT PERIOD_S COUNT [PID]
# For mksh and toybox as Android has them, and any POSIX shell. Nothing is started in the loop but sleep: a phone's cores
# should not be kept busy by being watched.
root=${1%/}
period=$2
count=$3
pid=$4
tab=$(printf '\t')

# The first line of a file into $value; "?" where it cannot be read or is empty.
first_line() {
    value=
    { IFS= read -r value < "$1"; } 2> /dev/null
    [ -n "$value" ] || value='?'
}

echo 'edgetrain-samples 1'
for file in "$root"/sys/class/power_supply/*/type "$root"/sys/class/power_supply/*/scope; do
    [ -r "$file" ] || continue
    first_line "$file"
    echo "#${file#"$root"/}$tab$value"
done

files=
header="uptime_s${tab}wall_s"
watch() {
    [ -r "$1" ] || return 0
    files="$files $1"
    header="$header$tab${1#"$root"/}"
}

for supply in "$root"/sys/class/power_supply/*; do
    for name in status online power_now current_now input_current_now voltage_now temp; do
        watch "$supply/$name"
    done
done
for file in "$root"/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq; do
    watch "$file"
done
# A phone has a hundred thermal zones; those of the processors and of the skin tell of training.
for zone in "$root"/sys/class/thermal/thermal_zone*; do
    first_line "$zone/type"
    case $value in
        *cpu* | *CPU* | *gpu* | *soc* | *batt* | *skin* | *quiet*)
            echo "#${zone#"$root"/}/type$tab$value"
            watch "$zone/temp"
            ;;
    esac
done
watch "$root/proc/stat"
if [ -n "$pid" ]; then
    for file in "$root/proc/$pid/task"/*/schedstat; do
        watch "$file"
    done
fi
echo "$header"

n=0
while [ "$n" -lt "$count" ]; do
    first_line "$root/proc/uptime"
    row="${value%% *}$tab${EPOCHREALTIME:-?}"
    for file in $files; do
        first_line "$file"
        row="$row$tab$value"
    done
    echo "$row"
    n=$((n + 1))
    [ "$n" -lt "$count" ] && sleep "$period"
done
exit 0
