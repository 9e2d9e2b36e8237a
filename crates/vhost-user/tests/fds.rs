//! Descriptors and mappings do not pile up. Alone in its process, whose descriptors it counts.

use bedplate_disk::{Disk, Layer};
use bedplate_storage::FileStorage;
use bedplate_types::{ByteLen, CacheMode};
use bedplate_vhost_user::frontend::{Client, ClientOptions};
use bedplate_vhost_user::{BlkOptions, VhostUserBlk};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("fd").count()
}

fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    maps.lines().filter(|l| l.contains("memfd:") || l.contains("(deleted)")).count()
}

#[test]
fn memory_cycles_and_sessions_leave_no_descriptor_and_no_mapping() {
    let layer = Layer::<FileStorage>::Null(ByteLen::new(1 << 30));
    let disk = Disk::new("null", vec![layer], false, CacheMode::None).expect("disk");
    let dir = tempfile::tempdir().expect("directory");
    let socket = dir.path().join("s");
    let options = BlkOptions { queues: 2, threads: 2, ..BlkOptions::default() };
    let export = VhostUserBlk::start(&socket, Arc::new(disk), options).expect("export");
    let options = ClientOptions { queues: 2, ..ClientOptions::default() };
    let mut counts = Vec::new();
    for round in 0..8 {
        let mut client = Client::connect(&socket, &options).expect("connect");
        let mut queues = client.take_queues();
        for q in &mut queues {
            q.flush().expect("flush");
        }
        if round == 4 {
            cycles(&mut client);
        }
        // While the session lives, so that its end can't be late.
        counts.push((descriptors(), mappings()));
    }
    assert!(counts.windows(2).skip(1).all(|w| w[0] == w[1]), "{counts:?}");
    export.stop();
    assert!(descriptors() < counts[0].0);
    assert_eq!(mappings(), 0);
}

fn cycles(client: &mut Client) {
    let file = tempfile::tempfile().expect("file");
    file.set_len(1 << 16).expect("size");
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 40,
        memory_size: 1 << 16,
        userspace_addr: 1 << 50,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    let before = (descriptors(), mappings());
    for _ in 0..600 {
        client.vhost().add_mem_region(&region).expect("ADD_MEM_REG");
        client.vhost().add_mem_region(&region).expect_err("the same again");
        client.vhost().remove_mem_region(&region).expect("REM_MEM_REG");
        client.vhost().remove_mem_region(&region).expect_err("gone already");
        assert_eq!((descriptors(), mappings()), before);
    }
}
