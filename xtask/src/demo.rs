//! `cargo xtask demo`: a Linux VM runs from a qcow2 disk that Bedplate serves, and makes file systems on two more; then the host
//! looks at what is left.
//!
//! The VM's root disk is built here without root rights (`mke2fs -d`), put into an image that Bedplate made, and holds files whose
//! checksums the guest verifies; what the guest writes is looked up in the images afterwards with tools that are not ours.

use crate::{report, setup};
use anyhow::{Context, Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::guest::{Assets, Vm, VmBuilder};
use bedplate_tests::server::{Program, Server};
use bedplate_tests::{host, paths};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The system disk's size; 1 GiB of which a few per cent are used.
const SYSTEM_SIZE: &str = "1G";
const DATA_SIZE: &str = "2G";

/// Runs in the guest. Lines that start with `demo` carry a name and a value to the host.
const GUEST: &str = r#"
cd /
echo "demo kernel $(uname -r)"
echo "demo root $(awk '$2 == "/" { device = $1 " " $3 } END { print device }' /proc/mounts)"
sha256sum -c /from-host/sums > /dev/null
echo "demo verified $(wc -l < /from-host/sums)"
dd if=/dev/urandom of=/tmp/random bs=1M count=48 2>/dev/null
echo "demo sum $(sha256sum < /tmp/random | cut -d ' ' -f 1)"
speed() { sed -n 's/.* copied, \([0-9.e-]*\) s.*/\1/p' /tmp/dd; }
try() { # device, file system
    mkfs.$2 -q /dev/$1
    mount /dev/$1 /mnt
    cp /tmp/random /mnt/rubbish
    sync
    dd if=/tmp/random of=/mnt/file bs=1M oflag=direct conv=fsync 2> /tmp/dd
    echo "demo $2-write $(speed)"
    echo 3 > /proc/sys/vm/drop_caches
    dd if=/mnt/file of=/tmp/back bs=1M iflag=direct 2> /tmp/dd
    echo "demo $2-read $(speed)"
    cmp /tmp/random /tmp/back
    rm /tmp/back /mnt/rubbish
    sync
    echo "demo $2-trimmed $(fstrim -v /mnt | sed 's/.*: //; s/ (.*//')"
    echo "demo $2-inode $(ls -i /mnt/file | awk '{ print $1 }')"
    umount /mnt
}
try vdb ext4
try vdc xfs
cp /tmp/random /from-guest
sync
for disk in vda vdb vdc; do echo "demo $disk-stat $(cat /sys/block/$disk/stat)"; done
"#;

/// Prints each step with its time, and keeps them for the table.
struct Steps(Vec<[String; 3]>);

impl Steps {
    fn step<T>(&mut self, what: &str, work: impl FnOnce() -> Result<(T, String)>) -> Result<T> {
        let start = Instant::now();
        let (value, result) = work().with_context(|| format!("while the demo did this: {what}"))?;
        let time = format!("{:.1} s", start.elapsed().as_secs_f64());
        println!("[{time:>7}] {what}: {result}");
        self.0.push([what.to_owned(), result, time]);
        Ok(value)
    }
}

/// The three disks: the system's, one for ext4, one for XFS.
struct Disks {
    system: Fixture,
    ext4: Fixture,
    xfs: Fixture,
}

impl Disks {
    fn each(&self) -> [(&Fixture, &'static str); 3] {
        [(&self.system, "ext4"), (&self.ext4, "ext4"), (&self.xfs, "xfs")]
    }
}

/// The whole demo.
pub fn run() -> Result<()> {
    setup::run()?;
    let mut steps = Steps(Vec::new());
    let start = Instant::now();
    let program = steps.step("build bedplate (release)", || {
        let path = paths::build_bedplate("release")?;
        let shown = path.display().to_string();
        Ok((Program::Bedplate(path), shown))
    })?;
    let disks = steps.step("make three qcow2 disks, one with an ext4 root file system", || {
        make_disks(&program)
    })?;
    let servers = steps.step("serve them over vhost-user-blk", || {
        let servers =
            disks.each().map(|(disk, _)| disk.serve()).into_iter().collect::<Result<Vec<_>>>()?;
        Ok((servers, "3 x bedplate serve, 2 queues each".to_owned()))
    })?;
    let assets = Assets::find()?;
    let log = paths::target().join("demo-serial.log");
    let mut vm = steps.step("boot Debian's cloud kernel from the first", || {
        let mut builder = VmBuilder::new(&assets).memory_mib(768).root("/dev/vda").serial_log(&log);
        for (disk, _) in disks.each() {
            builder = builder.disk(disk.disk());
        }
        let mode = if assets.accel == "kvm" {
            "with KVM"
        } else {
            "in software emulation, as KVM does not work here"
        };
        Ok((builder.boot()?, mode.to_owned()))
    })?;
    let facts = steps
        .step("guest makes ext4 and XFS, writes, syncs, reads back, trims", || in_guest(&mut vm))?;
    let cpu = power_off(&mut steps, vm, servers)?;
    steps.step("check the images with bedplate check and qemu-img check", || {
        disks.each().into_iter().try_for_each(|(disk, _)| disk.assert_clean())?;
        Ok(((), "3 images clean, no leaks".to_owned()))
    })?;
    let wanted = fact(&facts, "sum")?;
    steps.step("check the file systems and find the guest's files on the host", || {
        look_inside(&disks, &facts, wanted)
    })?;
    println!();
    report::table(
        &["step", "result", "time"],
        &steps.0.iter().map(|row| row.to_vec()).collect::<Vec<_>>(),
    );
    println!();
    requests_table(&disks, &facts, cpu)?;
    println!(
        "\nkernel {}, root {}; the guest's words are in {}",
        fact(&facts, "kernel")?,
        fact(&facts, "root")?,
        log.display()
    );
    println!("the demo took {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn make_disks(program: &Program) -> Result<(Disks, String)> {
    let make =
        |size| Fixture::with_program(program.clone(), "qcow2", size).map(|disk| disk.queues(2));
    let disks = Disks { system: make(SYSTEM_SIZE)?, ext4: make(DATA_SIZE)?, xfs: make(DATA_SIZE)? };
    let folder = disks.system.folder().join("tree");
    std::fs::create_dir_all(folder.join("from-host"))?;
    setup::system_tree()?.write_to(&folder)?;
    // The design documents travel along, so that there is something to verify.
    let mut sums = String::new();
    let mut documents: Vec<PathBuf> = std::fs::read_dir(paths::workspace().join("docs"))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    documents.extend(["README.md", "Cargo.lock"].map(|name| paths::workspace().join(name)));
    for file in documents.iter().filter(|file| file.is_file()) {
        let name = file
            .file_name()
            .and_then(|name| name.to_str())
            .context("a file name that is not text")?;
        std::fs::copy(file, folder.join("from-host").join(name))?;
        sums.push_str(&format!("{}  /from-host/{name}\n", host::sha256(file)?));
    }
    std::fs::write(folder.join("from-host/sums"), sums)?;
    let raw = disks.system.folder().join("system.raw");
    let options = ["-q", "-t", "ext4", "-E", "root_owner=0:0", "-L", "system", "-d"];
    host::run(host::tool("mke2fs").args(options).args([&folder, &raw]).arg(SYSTEM_SIZE))?;
    // `-n`: into the image that Bedplate has made.
    host::run(
        host::tool("qemu-img")
            .args(["convert", "-n", "-f", "raw", "-O", "qcow2"])
            .arg(&raw)
            .arg(disks.system.image()),
    )?;
    std::fs::remove_file(raw)?;
    let result = format!(
        "{SYSTEM_SIZE} ({} MiB on the host), {DATA_SIZE}, {DATA_SIZE}",
        disks.system.allocated()? >> 20
    );
    Ok((disks, result))
}

fn in_guest(vm: &mut Vm) -> Result<(HashMap<String, String>, String)> {
    let text = vm.run(GUEST)?;
    let lines = text.lines().filter_map(|line| line.strip_prefix("demo ")?.split_once(' '));
    let facts: HashMap<String, String> =
        lines.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
    ensure!(
        fact(&facts, "root")?.starts_with("/dev/vda"),
        "the guest's root is not the disk that was served"
    );
    let result =
        format!("{} files from the host verified; all read back equal", fact(&facts, "verified")?);
    Ok((facts, result))
}

fn power_off(steps: &mut Steps, vm: Vm, servers: Vec<Server>) -> Result<Vec<Duration>> {
    steps.step("power off, stop the servers", || {
        vm.power_off()?;
        let cpu = servers.iter().map(Server::cpu_time).collect::<Result<Vec<_>>>()?;
        servers.into_iter().try_for_each(|server| server.stop().map(drop))?;
        Ok((cpu, "all ended by themselves".to_owned()))
    })
}

fn look_inside(
    disks: &Disks,
    facts: &HashMap<String, String>,
    wanted: &str,
) -> Result<((), String)> {
    for (disk, kind) in disks.each() {
        disk.fsck(kind)?;
        let raw = disk.to_raw()?;
        let found = disk.folder().join("found");
        let name = if std::ptr::eq(disk, &disks.system) { "/from-guest" } else { "/file" };
        match kind {
            "ext4" => host::run(
                host::tool("debugfs")
                    .args(["-R", &format!("dump {name} {}", found.display())])
                    .arg(&raw),
            )
            .map(drop)?,
            _ => copy_from_xfs(&raw, fact(facts, "xfs-inode")?, &found)?,
        }
        let sum = host::sha256(&found)?;
        ensure!(
            sum == wanted,
            "{name} in {} has the checksum {sum}; the guest wrote {wanted}",
            disk.image().display()
        );
        std::fs::remove_file(&raw)?;
    }
    Ok((
        (),
        format!(
            "e2fsck and xfs_repair find nothing; 3 checksums equal ({}...)",
            &wanted[..wanted.len().min(12)]
        ),
    ))
}

/// Copies a file out of an XFS image by its list of extents, without mounting it.
fn copy_from_xfs(raw: &Path, inode: &str, to: &Path) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let database = |commands: &[&str]| {
        let mut tool = host::tool("xfs_db");
        for command in commands {
            tool.args(["-c", command]);
        }
        host::run(tool.args(["-r", "-f"]).arg(raw))
    };
    let number =
        |text: &str| text.trim().parse::<u64>().with_context(|| format!("xfs_db said {text:?}"));
    let value = |text: &str| number(text.rsplit_once("= ").map_or(text, |(_, value)| value));
    let go = format!("inode {inode}");
    let size = value(&database(&[&go, "print core.size"])?)?;
    let block = value(&database(&["sb 0", "print blocksize"])?)?;
    let (from, out) = (std::fs::File::open(raw)?, std::fs::File::create(to)?);
    for line in database(&[&go, "bmap -d"])?.lines() {
        // data offset 0 startblock 24 (0/24) count 4096 flag 0
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "offset", offset, "startblock", start, _, "count", count, ..] = words.as_slice()
        else {
            continue;
        };
        let place = database(&[&format!("convert fsblock {start} byte")])?;
        let place =
            place.split(['(', ')']).nth(1).context("xfs_db did not convert a block number")?;
        let mut content = vec![0; usize::try_from(number(count)? * block)?];
        from.read_exact_at(&mut content, number(place)?)?;
        out.write_all_at(&content, number(offset)? * block)?;
    }
    out.set_len(size)?;
    Ok(())
}

fn fact<'a>(facts: &'a HashMap<String, String>, name: &str) -> Result<&'a str> {
    facts
        .get(name)
        .map(String::as_str)
        .with_context(|| format!("the guest did not report {name:?}"))
}

/// Requests as the guest's kernel counted them, and the throughput of its direct 1 MiB reads and writes.
fn requests_table(
    disks: &Disks,
    facts: &HashMap<String, String>,
    cpu: Vec<Duration>,
) -> Result<()> {
    const MIB: f64 = 48.0;
    let mut rows = Vec::new();
    for (((disk, _), cpu), (device, name)) in
        disks.each().iter().zip(cpu).zip([("vda", "system"), ("vdb", "ext4"), ("vdc", "xfs")])
    {
        let stat = fact(facts, &format!("{device}-stat"))?;
        let numbers: Vec<u64> =
            stat.split_whitespace().map(|word| word.parse().unwrap_or(0)).collect();
        let count = |at: usize| numbers.get(at).copied().unwrap_or(0);
        let speed = |what: &str| match facts
            .get(&format!("{name}-{what}"))
            .and_then(|text| text.parse::<f64>().ok())
        {
            Some(seconds) if seconds > 0.0 => format!("{:.0}", MIB / seconds),
            _ => "-".to_owned(),
        };
        rows.push(vec![
            format!("{device} ({name})"),
            count(0).to_string(),
            count(4).to_string(),
            count(11).to_string(),
            count(15).to_string(),
            format!("{:.0}", count(2) as f64 / 2048.0),
            format!("{:.0}", count(6) as f64 / 2048.0),
            speed("read"),
            speed("write"),
            facts.get(&format!("{name}-trimmed")).map_or("-", String::as_str).to_owned(),
            format!("{}", disk.allocated()? >> 20),
            format!("{:.2} s", cpu.as_secs_f64()),
        ]);
    }
    let heads = [
        "disk",
        "reads",
        "writes",
        "discards",
        "flushes",
        "MiB read",
        "MiB written",
        "read MiB/s",
        "write MiB/s",
        "trimmed",
        "MiB on host",
        "server CPU",
    ];
    report::table(&heads, &rows);
    Ok(())
}
