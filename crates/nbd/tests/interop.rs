//! Programs of others as clients: QEMU's tools, libnbd's and fio, over Unix and TCP sockets.

mod common;

use bedplate_types::CacheMode;
use common::{How, Served, arg, have, pattern, run, serve};

/// Unix and TCP, raw and qcow2, direct and cached.
fn ways() -> Vec<How> {
    let way = |tcp, qcow2, cache| How { tcp, qcow2, cache, read_only: false };
    let mut all = vec![way(false, false, CacheMode::None), way(true, false, CacheMode::Writeback)];
    if have("qemu-img") {
        all.push(way(true, true, CacheMode::None));
        all.push(way(false, true, CacheMode::Writeback));
    }
    all
}

/// Stops the server; a qcow2 image must be without fault for QEMU then.
fn finish(s: Served, how: How) {
    let (_dir, file) = s.close();
    if how.qcow2 {
        run("qemu-img", &["check", "-f", "qcow2", arg(&file)]);
    }
}
const MIB: usize = 1 << 20;

#[test]
fn nbdinfo_reads_what_the_server_offers() {
    if !have("nbdinfo") {
        return;
    }
    for how in ways() {
        let s = serve(&pattern(3 * MIB), how);
        assert_eq!(run("nbdinfo", &["--size", &s.uri()]).trim(), (3 * MIB).to_string());
        let text = run("nbdinfo", &[&s.uri()]);
        for line in [
            "protocol: newstyle-fixed without TLS, using structured packets",
            "export=\"disk\":",
            "description: a test",
            "base:allocation",
            "is_read_only: false",
            "can_cache: true",
            "can_df: true",
            "can_fast_zero: true",
            "can_flush: true",
            "can_fua: true",
            "can_multi_conn: true",
            "can_trim: true",
            "can_zero: true",
            "block_size_preferred: 4096",
            "block_size_maximum: 33554432",
        ] {
            assert!(text.contains(line), "{line:?} is not in:\n{text}");
        }
        let list = run("nbdinfo", &["--list", &s.addr.to_string()]);
        assert!(list.contains("export=\"second\":"), "{list}");
        let map = run("nbdinfo", &["--map", &s.uri()]);
        assert!(map.starts_with("         0     3145728    0  data"), "{map}");
        finish(s, how);
    }
}

#[test]
fn nbdcopy_copies_both_ways() {
    if !have("nbdcopy") {
        return;
    }
    for how in ways() {
        for len in [64 * MIB, 100_001, 513, 1] {
            let mut content = pattern(len);
            let hole = len / 4..len / 2;
            content[hole].fill(0);
            let s = serve(&vec![0xee; len], how);
            let (from, to) = (s.path("from"), s.path("to"));
            std::fs::write(&from, &content).expect("written");
            run("nbdcopy", &["--flush", arg(&from), &s.uri()]);
            run("nbdcopy", &[&s.uri(), arg(&to)]);
            let back = std::fs::read(&to).expect("read");
            assert!(back[..len] == content, "{len} bytes");
            assert!(back[len..].iter().all(|b| *b == 0));
            finish(s, how);
        }
    }
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    if !have("qemu-img") {
        return;
    }
    for how in ways() {
        for len in [20 * MIB, 100_001] {
            let mut content = pattern(len);
            content[len / 4..len / 2].fill(0);
            let s = serve(&vec![0xee; len.next_multiple_of(512)], how);
            let (from, to) = (s.path("from"), s.path("to"));
            std::fs::write(&from, &content).expect("written");
            let uri = s.uri();
            let raw = ["-f", "raw", "-O", "raw"];
            run("qemu-img", &[&["convert", "-n"], &raw[..], &[arg(&from), &uri]].concat());
            run("qemu-img", &[&["convert"], &raw[..], &[&uri, arg(&to)]].concat());
            let back = std::fs::read(&to).expect("read");
            assert!(back[..len] == content, "{len} bytes");
            run("qemu-img", &["compare", "-f", "raw", "-F", "raw", arg(&to), &uri]);
            run("qemu-img", &["map", "-f", "raw", &uri]);
            // The bench reads past the end of a disk that is no multiple of its requests.
            if len % 4096 == 0 {
                let bench = ["bench", "-f", "raw", "-c", "2000", "-d", "64", "-s", "4k", &uri];
                run("qemu-img", &bench);
            }
            finish(s, how);
        }
    }
}

#[test]
fn qemu_io_writes_zeroes_discards_and_flushes() {
    if !have("qemu-io") {
        return;
    }
    for how in ways() {
        let s = serve(&pattern(8 * MIB), how);
        let io = |commands: &[&str]| {
            let uri = s.uri();
            let mut args = vec!["-f", "raw", "--discard=unmap", &uri];
            commands.iter().for_each(|c| args.extend(["-c", c]));
            let text = run("qemu-io", &args);
            assert!(!text.contains("failed"), "{text}");
        };
        io(&[
            "write -P 17 64k 128k",
            "read -P 17 64k 128k",
            "write -f -P 18 1000 3000",
            "read -P 18 1000 3000",
            "write -z 1M 1M",
            "read -P 0 1M 1M",
            "write -z -u 2M 1M",
            "write -z -n 1M 64k",
            "read -P 0 2M 1M",
            "discard 3M 1M",
            "aio_write -P 1 4M 1M",
            "aio_write -P 2 5M 1M",
            "aio_read 0 1M",
            "aio_flush",
            "flush",
            "map",
        ]);
        io(&["read -P 1 4M 1M", "read -P 2 5M 1M", "read -P 17 64k 128k"]);
        finish(s, how);
    }
}

#[test]
fn qemu_io_reads_and_writes_the_last_byte_of_an_odd_disk() {
    if !have("qemu-io") {
        return;
    }
    for how in ways() {
        let s = serve(&pattern(100_001), how);
        let uri = s.uri();
        let text = run(
            "qemu-io",
            &["-f", "raw", "-c", "write -P 77 100000 1", "-c", "read -P 77 100000 1", &uri],
        );
        assert!(!text.contains("failed"), "{text}");
        finish(s, how);
    }
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !have("fio") || !run("fio", &["--enghelp"]).contains("nbd") {
        eprintln!("SKIPPED: fio with its nbd engine is not installed");
        return;
    }
    for how in ways() {
        let s = serve(&vec![0; 32 * MIB], how);
        let state = s.dir.path();
        for bs in ["4k", "4k-64k"] {
            let uri = format!("--uri={}", s.uri());
            let args = [
                "--name=v",
                "--ioengine=nbd",
                &uri,
                "--rw=randwrite",
                &format!("--bsrange={}", if bs == "4k" { "4k-4k" } else { bs }),
                "--iodepth=32",
                "--size=32m",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--do_verify=1",
                "--fsync=64",
                &format!("--aux-path={}", arg(state)),
            ];
            let text = run("fio", &args);
            assert!(text.contains("err= 0"), "{text}");
        }
        finish(s, how);
    }
}
