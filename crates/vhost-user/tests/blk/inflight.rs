//! Records of requests under way: what a back end that was killed had begun is done by the next one.

use crate::rig::{Rig, SIZE};
use bedplate_vhost_user::BlkOptions;
use bedplate_vhost_user::frontend::{Buffer, Client, ClientOptions, Queue};
use bedplate_virtio::inflight::InflightArea;
use bedplate_virtio::spec::T_OUT;
use bedplate_virtio::split::{Head, Pop, SplitQueue};
use bedplate_virtio::vanish::Alarm;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures};

fn options() -> ClientOptions {
    let mut options =
        ClientOptions { features: !bedplate_virtio::spec::F_EVENT_IDX, ..Default::default() };
    options.protocol |= VhostUserProtocolFeatures::INFLIGHT_SHMFD;
    options
}

/// A write of 512 times `byte` to sector `sector`, laid out at descriptor `head`.
fn lay_out_write(q: &mut Queue, head: u16, sector: u64, byte: u8) {
    let at = q.room().0 + u64::from(head) * 4096;
    let mut header = [0; 16];
    header[..4].copy_from_slice(&T_OUT.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    q.memory().write(at, &header);
    q.memory().fill(at + 512, 512, byte);
    q.memory().fill(at + 2048, 1, 0xff);
    let part = |from, len, write| Buffer { addr: at + from, len, write };
    q.lay_out(head, &[part(0, 16, false), part(512, 512, false), part(2048, 1, true)]);
    q.ring().add(head);
}

fn area(client: &mut Client) -> (VhostUserInflight, File) {
    let wish = VhostUserInflight::new(0, 0, 1, 256);
    client.vhost().get_inflight_fd(&wish).expect("area")
}

fn take(queue: &mut SplitQueue, q: &Queue) -> Head {
    match queue.pop(q.memory().memory(), &mut Vec::new()) {
        Ok(Pop::Chain(head, _)) => head,
        other => panic!("expected a chain, got {other:?}"),
    }
}

#[test]
fn requests_that_a_killed_back_end_left_are_done_once_more_and_none_is_lost() {
    let rig = Rig::raw();
    let mut client = Client::negotiate(&rig.socket(), &options()).expect("negotiate");
    client.share_memory().expect("memory");
    let mut q = client.make_queue(0, &options()).expect("queue");
    let (info, file) = area(&mut client);
    for (head, byte) in [(0, 1), (6, 2), (3, 3), (9, 4)] {
        lay_out_write(&mut q, head, u64::from(byte), byte);
    }
    q.ring().publish();
    {
        // The back end that dies: it takes three, and gives the second back without an interrupt.
        let place = (info.mmap_offset, info.mmap_size);
        let alarm = Alarm::new().expect("alarm");
        let map = InflightArea::map(&file, place, info.num_queues, info.queue_size, &alarm);
        let records = Arc::new(map.expect("map")).queue(0).expect("records");
        let addrs = q.ring().addrs(0);
        let memory = q.memory().memory();
        let mut dead = SplitQueue::new(memory, 256, addrs, 0, false).expect("queue");
        dead.keep_records(records).expect("kept");
        let (first, second, third) =
            (take(&mut dead, &q), take(&mut dead, &q), take(&mut dead, &q));
        dead.push_used(second, 1);
        dead.publish();
        first.abandon();
        third.abandon();
    }
    client.vhost().set_inflight_fd(&info, file.as_raw_fd()).expect("records");
    client.start_queue(&q, 1).expect("start");
    let mut heads = (0..4).map(|_| q.wait().expect("answer").head).collect::<Vec<_>>();
    assert_eq!(heads.remove(0), 6, "given back before");
    heads.sort_unstable();
    assert_eq!(heads, [0, 3, 9]);
    let disk = rig.file();
    assert_eq!(disk.len() as u64, SIZE);
    for (sector, byte) in [(1, 1), (2, 0), (3, 3), (4, 4)] {
        assert_eq!(disk[sector * 512..][..512], [byte; 512], "sector {sector}");
    }
    q.write(4096, &[9; 512]).expect("the queue goes on");
    // Nothing is left to do for the next one.
    let alarm = Alarm::new().expect("alarm");
    let map = InflightArea::map(&file, (0, info.mmap_size), 1, 256, &alarm).expect("map");
    let addrs = q.ring().addrs(0);
    let mut next = SplitQueue::new(q.memory().memory(), 256, addrs, 5, false).expect("queue");
    next.keep_records(Arc::new(map).queue(0).expect("records")).expect("kept");
    assert!(!next.has_again());
}

#[test]
fn completions_shown_before_the_kill_are_announced_after_it() {
    let rig = Rig::raw();
    let mut client = Client::negotiate(&rig.socket(), &options()).expect("negotiate");
    client.share_memory().expect("memory");
    let q = client.make_queue(0, &options()).expect("queue");
    client.start_queue(&q, 0).expect("start");
    // The ring is empty: only the interrupt at the start can end this wait early.
    // SAFETY: the descriptor is open as long as the queue lives.
    let call = unsafe { BorrowedFd::borrow_raw(q.call().as_raw_fd()) };
    let patience = Timespec { tv_sec: 30, tv_nsec: 0 };
    let mut fds = [PollFd::from_borrowed_fd(call, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&patience)), Ok(1));
}

#[test]
fn records_that_do_not_fit_are_refused_and_the_session_goes_on() {
    let rig =
        Rig::with(BlkOptions { queues: 2, ..BlkOptions::default() }, |d| crate::rig::raw(d, false));
    let mut client = rig.client(&options());
    let mut q = client.take_queues().pop().expect("queue");
    let (info, file) = area(&mut client);
    let fd = file.as_raw_fd();
    let longer = VhostUserInflight { mmap_size: info.mmap_size + 4096, ..info };
    assert!(client.vhost().set_inflight_fd(&longer, fd).is_err());
    let shorter = VhostUserInflight { mmap_size: 64, ..info };
    assert!(client.vhost().set_inflight_fd(&shorter, fd).is_err());
    let plain = tempfile::tempfile().expect("file");
    plain.set_len(info.mmap_size).expect("length");
    assert!(client.vhost().set_inflight_fd(&info, plain.as_raw_fd()).is_err(), "not sealed");
    q.write(0, &[1; 512]).expect("write");
    client.vhost().set_inflight_fd(&info, fd).expect("records, while the ring runs");
    q.write(0, &[2; 512]).expect("write");
    assert_eq!(q.read(0, 512).expect("read"), [2; 512]);
}
