//! One virtual machine: its QEMU process, its serial agent, its monitor.
//!
//! Invariants: one guest at a time on the whole machine (software emulation takes all cores, and two at once would only time
//! out); QEMU is killed when the value is dropped; guest memory is a shared memfd, as vhost-user needs.

use super::serial::{Reply, Serial};
use super::{Assets, Qmp};
use crate::{host, paths};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// From the start of QEMU to the agent's first words, on a slow and busy machine with software emulation.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// For an ordinary script.
const SCRIPT_LIMIT: Duration = Duration::from_secs(180);

/// These initcalls take half a second of every emulated boot and are of no use here.
const SKIPPED_INITCALLS: &str = "jent_mod_init,load_system_certificate_list,init_encrypted,crypto_kdf108_init,bpf_tcp_ca_kfunc_init";

/// A disk that the guest has from a vhost-user-blk server.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The server's socket.
    pub socket: PathBuf,
    /// Virtqueues the guest's device has.
    pub queues: u16,
    /// Further properties of the device, such as `config-wce=off`.
    pub properties: Vec<(String, String)>,
}

impl Disk {
    /// A disk with one queue.
    pub fn new(socket: &Path) -> Disk {
        Disk { socket: socket.to_path_buf(), queues: 1, properties: Vec::new() }
    }

    /// Sets the number of virtqueues.
    pub fn queues(mut self, queues: u16) -> Disk {
        self.queues = queues;
        self
    }

    /// Adds a property of the device.
    pub fn property(mut self, name: &str, value: &str) -> Disk {
        self.properties.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// How a guest is made.
#[derive(Clone, Debug)]
pub struct VmBuilder {
    assets: Assets,
    memory_mib: u32,
    cpus: u32,
    disks: Vec<Disk>,
    root: Option<String>,
    slots: u32,
    tools: Option<PathBuf>,
    serial_log: Option<PathBuf>,
    boot_limit: Duration,
}

impl VmBuilder {
    /// A guest with 2 CPUs, 512 MiB of memory and no disk.
    pub fn new(assets: &Assets) -> VmBuilder {
        VmBuilder {
            assets: assets.clone(),
            memory_mib: 512,
            cpus: 2,
            disks: Vec::new(),
            root: None,
            slots: 0,
            tools: None,
            serial_log: None,
            boot_limit: BOOT_LIMIT,
        }
    }

    /// Adds a disk: `/dev/vda`, `/dev/vdb`, ... in this order.
    pub fn disk(mut self, disk: Disk) -> VmBuilder {
        self.disks.push(disk);
        self
    }

    /// Sets the memory.
    pub fn memory_mib(mut self, mib: u32) -> VmBuilder {
        self.memory_mib = mib;
        self
    }

    /// Makes this disk the guest's root file system (it holds the agent as `/sbin/init`).
    pub fn root(mut self, device: &str) -> VmBuilder {
        self.root = Some(device.to_owned());
        self
    }

    /// Adds PCI Express ports `port0`, `port1`, ... into which disks can be plugged later.
    pub fn hot_plug_slots(mut self, slots: u32) -> VmBuilder {
        self.slots = slots;
        self
    }

    /// Adds a disk with programs, which QEMU itself serves read-only, after all others.
    pub fn tools(mut self, image: &Path) -> VmBuilder {
        self.tools = Some(image.to_path_buf());
        self
    }

    /// Keeps what came over the serial line in this file.
    pub fn serial_log(mut self, path: &Path) -> VmBuilder {
        self.serial_log = Some(path.to_path_buf());
        self
    }

    /// Sets how long the guest may take to come up.
    pub fn boot_limit(mut self, limit: Duration) -> VmBuilder {
        self.boot_limit = limit;
        self
    }

    /// Starts QEMU and waits until the agent is there.
    pub fn boot(self) -> Result<Vm> {
        let lock = File::create(paths::guest().join("vm.lock")).context("the guests' lock file")?;
        lock.lock().context("the guests' lock file")?;
        let dir = tempfile::tempdir()?;
        let monitor = dir.path().join("qmp");
        let mut command = host::tool("qemu-system-x86_64");
        command.args(self.arguments(&monitor));
        let errors = dir.path().join("qemu.log");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&errors)?);
        let started = Instant::now();
        let mut child = command.spawn().context("qemu-system-x86_64 can't be run")?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let mut guard = Process { child };
        let serial_log = self.serial_log.clone().unwrap_or_else(|| dir.path().join("serial.log"));
        let mut serial =
            Serial::new(input.context("no stdin")?, output.context("no stdout")?, &serial_log)?;
        let ready = serial.wait_line("GUEST: ready", self.boot_limit);
        if let Err(error) = ready {
            let _ = guard.child.kill();
            let said = std::fs::read_to_string(&errors).unwrap_or_default();
            return Err(error.context(format!("{}\nQEMU said: {said}", host::show(&command))));
        }
        let qmp = Qmp::connect(&monitor)?;
        Ok(Vm {
            process: guard,
            serial,
            qmp,
            boot_time: started.elapsed(),
            plugged: 0,
            _dir: dir,
            _lock: lock,
        })
    }

    fn arguments(&self, monitor: &Path) -> Vec<String> {
        let accel = if self.assets.accel == "kvm" { "kvm" } else { "tcg,thread=multi" };
        let cpu = if self.assets.accel == "kvm" { "host" } else { "max" };
        let memory = format!("{}M", self.memory_mib);
        let mut kernel_line = format!(
            "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check tsc=reliable ipv6.disable=1 apparmor=0 audit=0 initcall_blacklist={SKIPPED_INITCALLS}"
        );
        if let Some(root) = &self.root {
            kernel_line.push_str(&format!(" agent_root={root}"));
        }
        let fixed = [
            ("-machine", "q35,memory-backend=memory".to_owned()),
            ("-object", format!("memory-backend-memfd,id=memory,size={memory},share=on")),
            ("-accel", accel.to_owned()),
            ("-cpu", cpu.to_owned()),
            ("-smp", self.cpus.to_string()),
            ("-m", memory.clone()),
            ("-display", "none".to_owned()),
            ("-serial", "stdio".to_owned()),
            ("-monitor", "none".to_owned()),
            ("-qmp", format!("unix:{},server=on,wait=off", monitor.display())),
            ("-kernel", self.assets.kernel.display().to_string()),
            ("-initrd", self.assets.initramfs.display().to_string()),
            ("-append", kernel_line),
        ];
        let mut all: Vec<String> =
            ["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned).to_vec();
        all.extend(fixed.into_iter().flat_map(|(name, value)| [name.to_owned(), value]));
        for slot in 0..self.slots {
            all.extend([
                "-device".to_owned(),
                format!("pcie-root-port,id=port{slot},chassis={slot},slot={slot}"),
            ]);
        }
        for (number, disk) in self.disks.iter().enumerate() {
            let path = disk.socket.display();
            all.extend([
                "-chardev".to_owned(),
                format!("socket,id=char{number},path={path},reconnect-ms=100"),
            ]);
            let mut device = format!(
                "vhost-user-blk-pci,id=disk{number},chardev=char{number},num-queues={}",
                disk.queues
            );
            for (name, value) in &disk.properties {
                device.push_str(&format!(",{name}={value}"));
            }
            all.extend(["-device".to_owned(), device]);
        }
        if let Some(tools) = &self.tools {
            let file = format!("file={},format=raw,readonly=on,if=none,id=tools", tools.display());
            let words = ["-drive", &file, "-device", "virtio-blk-pci,drive=tools"];
            all.extend(words.map(str::to_owned));
        }
        all
    }
}

#[derive(Debug)]
struct Process {
    child: Child,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running guest.
#[derive(Debug)]
pub struct Vm {
    process: Process,
    serial: Serial,
    qmp: Qmp,
    boot_time: Duration,
    plugged: u32,
    _dir: tempfile::TempDir,
    _lock: File,
}

impl Vm {
    /// From the start of QEMU to the agent's first words.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// The monitor.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Runs a shell script to its end, whatever its exit code.
    pub fn sh(&mut self, script: &str) -> Result<Reply> {
        self.start(script)?;
        self.finish(SCRIPT_LIMIT)
    }

    /// Runs a shell script that must succeed (`set -e` is in force) and returns what it wrote.
    pub fn run(&mut self, script: &str) -> Result<String> {
        let reply = self.sh(&format!("set -e\n{script}"))?;
        if reply.code != 0 {
            let kernel =
                self.sh("dmesg | tail -n 15").map(|reply| reply.output).unwrap_or_default();
            bail!(
                "in the guest ended with {}:\n{script}\nIt wrote:\n{}\nThe kernel's last words:\n{kernel}",
                reply.code,
                reply.output
            );
        }
        Ok(reply.output)
    }

    /// Starts a script and returns at once; [`Vm::finish`] waits for it.
    pub fn start(&mut self, script: &str) -> Result<()> {
        self.serial.start(script)
    }

    /// Waits for the script started last.
    pub fn finish(&mut self, limit: Duration) -> Result<Reply> {
        self.serial.finish(limit)
    }

    /// Waits for a line that the running script writes; the line starts with `start`.
    pub fn wait_line(&mut self, start: &str, limit: Duration) -> Result<String> {
        self.serial.wait_line(start, limit).map(|(_, rest)| rest)
    }

    /// Plugs a disk into the hot-plug port `port`; gives the device's id back. The guest needs a moment to find it.
    pub fn plug(&mut self, disk: &Disk, port: u32) -> Result<String> {
        self.plugged += 1;
        let (chardev, id) = (format!("plugchar{}", self.plugged), format!("plug{}", self.plugged));
        let address = json!({ "type": "unix", "data": { "path": disk.socket } });
        let socket = json!({ "addr": address, "server": false, "reconnect-ms": 100 });
        self.qmp.command(
            "chardev-add",
            json!({ "id": chardev, "backend": { "type": "socket", "data": socket } }),
        )?;
        let mut device = json!({
            "driver": "vhost-user-blk-pci", "id": id, "chardev": chardev, "bus": format!("port{port}"), "num-queues": disk.queues,
        });
        for (name, value) in &disk.properties {
            device[name] = match value.as_str() {
                "on" => json!(true),
                "off" => json!(false),
                other => json!(other),
            };
        }
        self.qmp.command("device_add", device)?;
        Ok(id)
    }

    /// Takes a plugged disk away and waits until the guest has let it go.
    pub fn unplug(&mut self, id: &str) -> Result<()> {
        self.qmp.command("device_del", json!({ "id": id }))?;
        loop {
            let event = self.qmp.wait_event("DEVICE_DELETED", Duration::from_secs(60))?;
            if event["data"]["device"] == id {
                break;
            }
        }
        let chardev = id.replace("plug", "plugchar");
        self.qmp.command("chardev-remove", json!({ "id": chardev })).map(drop)
    }

    /// Lets the guest sync, unmount and power off, and waits for QEMU's end.
    pub fn power_off(mut self) -> Result<()> {
        self.serial.send("off")?;
        let status =
            host::wait_for("QEMU to end after the guest's power-off", SCRIPT_LIMIT, || {
                Ok(self.process.child.try_wait()?)
            })?;
        if !status.success() {
            bail!("QEMU ended with {status} after the guest's power-off");
        }
        Ok(())
    }

    /// Kills QEMU without warning, as a host's out-of-memory killer would.
    pub fn kill(mut self) -> Result<()> {
        self.process.child.kill().context("QEMU can't be killed")?;
        self.process.child.wait().context("QEMU can't be waited for").map(drop)
    }
}
