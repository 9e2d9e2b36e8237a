#!/bin/sh
# The guest's agent. Runs as the first process of the initramfs and, after `agent_root=DEVICE`, again as /sbin/init of that disk.
export PATH=/bin:/sbin HOME=/root
if [ ! -e /proc/uptime ]; then
    mount -t devtmpfs dev /dev
    mount -t proc proc /proc
    mount -t sysfs sys /sys
    mount -t tmpfs run /run
fi
exec < /dev/ttyS0 > /dev/ttyS0 2>&1
stty -echo -onlcr
dmesg -n 1
if [ -e /modules/order ]; then
    while read -r module; do insmod "/modules/$module" || echo "GUEST: $module can't be loaded"; done < /modules/order
fi
if [ -n "$agent_root" ]; then
    device=$agent_root
    unset agent_root
    tries=0
    while [ ! -b "$device" ] && [ $tries -lt 200 ]; do sleep 0.05; tries=$((tries + 1)); done
    if mount "$device" /mnt; then
        for folder in dev proc sys run; do mount --move /$folder /mnt/$folder; done
        exec switch_root /mnt /sbin/init
    fi
    echo "GUEST: no root file system on $device"
fi
mount -t tmpfs tmp /tmp
read -r uptime rest < /proc/uptime
echo "GUEST: ready after $uptime s"
: > /run/script.base64
while read -r verb argument; do
    case $verb in
    data)
        printf '%s' "$argument" >> /run/script.base64
        echo "GUEST: data"
        ;;
    run)
        base64 -d < /run/script.base64 > /run/script
        : > /run/script.base64
        sh /run/script < /dev/null
        code=$?
        echo
        echo "GUEST: done $argument $code"
        ;;
    off)
        sync
        umount -a -r
        poweroff -f
        ;;
    esac
done
