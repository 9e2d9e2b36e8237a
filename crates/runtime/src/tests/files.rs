//! Files: transfers with and without futures, back-pressure, cancellation, registered files.

use super::*;
use crate::{DirectOp, Idle, Wait, fs, spawn, yield_now};
use bedplate_types::{ByteLen, ErrorKind, HostOffset};
use futures_util::future::join_all;
use std::future::{Future, poll_fn};
use std::os::fd::AsRawFd;
use std::pin::pin;
use std::task::Poll;

#[test]
fn what_is_written_is_read_back_and_the_end_of_file_is_a_short_read() {
    on_both(&Config::default(), |rt| {
        rt.block_on(async {
            let file = temp_file();
            let data = pattern(10_000, 1).iovec();
            fs::write_full(&file, data.clone(), HostOffset::new(4096)).await.expect("write");
            fs::fsync(&file, true).await.expect("sync");
            let back = SharedBuf::zeroed(20_000).expect("memory").iovec();
            let n = fs::read_full(&file, back.clone(), HostOffset::new(4096)).await.expect("read");
            assert_eq!(n, 10_000);
            assert_eq!(bytes_of(&back.slice(0, n)), bytes_of(&data));
            assert_eq!(fs::read(&file, back, HostOffset::new(1 << 30)).await.expect("read"), 0);
        });
    });
}

#[test]
fn direct_transfers_of_one_and_of_several_segments_return_their_tokens() {
    on_both(&Config::default(), |rt| {
        let file = temp_file();
        let mut data = pattern(512, 1).iovec();
        data.append(pattern(1024, 2).iovec());
        let back = SharedBuf::zeroed(1536).expect("memory").iovec();
        for (op, v, token) in [(DirectOp::Write, &data, u64::MAX), (DirectOp::Read, &back, 7)] {
            let (iov, n) = v.as_iovecs();
            // SAFETY: both lists live to the end of the closure, after the completions.
            assert!(unsafe {
                rt.submit_direct(op, &file, iov, n as u32, HostOffset::new(0), token)
            });
            assert_eq!(rt.in_flight(), 1);
            let mut done = Vec::new();
            while done.is_empty() {
                rt.turn(Wait::Forever);
                rt.take_direct(&mut done);
            }
            assert_eq!(done, [(token, 1536)]);
            assert_eq!(rt.in_flight(), 0);
        }
        assert_eq!(bytes_of(&back), bytes_of(&data));
    });
}

#[test]
fn many_more_operations_than_the_ring_holds_all_complete() {
    on_both(&tiny(), |rt| {
        let file = temp_file();
        let write = async |i: u64| {
            let data = pattern(512, i as u8).iovec();
            fs::write_full(&file, data, HostOffset::new(i * 512)).await.expect("write");
        };
        rt.block_on(join_all((0..300).map(write)));
        let check = async |i: u64| {
            let back = SharedBuf::zeroed(512).expect("memory").iovec();
            let n = fs::read_full(&file, back.clone(), HostOffset::new(i * 512)).await;
            assert_eq!(n.expect("read"), 512);
            assert_eq!(bytes_of(&back), bytes_of(&pattern(512, i as u8).iovec()));
        };
        rt.block_on(join_all((0..300).map(check)));
        assert_eq!(rt.in_flight(), 0);
    });
}

#[test]
fn direct_transfers_beyond_the_ring_are_refused_or_done_but_never_lost() {
    on_both(&tiny(), |rt| {
        let file = temp_file();
        let data = pattern(512, 3).iovec();
        let (iov, n) = data.as_iovecs();
        let mut done = Vec::new();
        for token in 0..500 {
            let at = HostOffset::new(token * 512);
            // SAFETY: the list and its memory live to the end of the closure, after the completions.
            while !unsafe { rt.submit_direct(DirectOp::Write, &file, iov, n as u32, at, token) } {
                rt.turn(Wait::Forever);
                rt.take_direct(&mut done);
            }
        }
        while done.len() < 500 {
            rt.turn(Wait::Forever);
            rt.take_direct(&mut done);
        }
        done.sort_unstable();
        assert_eq!(done, (0..500).map(|t| (t, 512)).collect::<Vec<_>>());
        assert_eq!(rt.in_flight(), 0);
    });
}

#[test]
fn a_lone_direct_transfer_completes_wherever_it_is_submitted_from() {
    on_both(&Config::default(), |rt| {
        let file = temp_file();
        let data = pattern(512, 3).iovec();
        let (iov, n) = data.as_iovecs();
        let mut done = Vec::new();
        let mut submitted = 0;
        // SAFETY: the list and its memory live to the end of the closure, after the completions.
        let mut submit = |token| unsafe {
            let at = HostOffset::new(token * 512);
            assert!(rt.submit_direct(DirectOp::Write, &file, iov, n as u32, at, token));
            submitted += 1;
        };
        for token in 0..100 {
            if token % 2 == 0 {
                submit(token);
            } else {
                // Right before the thread would sleep, and without saying so.
                let mut once = Some(token);
                rt.turn_polling(Wait::For(Duration::from_secs(60)), &mut |idle| {
                    if idle == Idle::Sleeping {
                        once.take().into_iter().for_each(&mut submit);
                    }
                    false
                });
            }
            while done.len() as u64 <= token {
                rt.turn(Wait::Forever);
                rt.take_direct(&mut done);
            }
        }
        assert_eq!(submitted, 100);
        assert!(done.iter().enumerate().all(|(i, d)| *d == (i as u64, 512)));
    });
}

#[test]
fn a_runtime_that_ends_does_its_lone_direct_transfer() {
    for backend in [Backend::Threads, Backend::Auto] {
        let std_file = tempfile::tempfile().expect("temporary file");
        let file = File::new(std_file.try_clone().expect("dup").into());
        let data = pattern(512, 3).iovec();
        let (iov, n) = data.as_iovecs();
        let rt = Runtime::new(Config { backend, ..tiny() }).expect("runtime");
        let at = HostOffset::new(0);
        // SAFETY: the memory outlives the runtime.
        assert!(unsafe { rt.submit_direct(DirectOp::Write, &file, iov, n as u32, at, 1) });
        assert_eq!(rt.in_flight(), 1);
        drop(rt);
        assert_eq!(std_file.metadata().expect("metadata").len(), 512);
    }
}

#[test]
fn more_completions_at_once_than_the_completion_ring_holds_are_all_seen() {
    on_both(&tiny(), |rt| {
        let event = crate::EventFd::new().expect("eventfd");
        let n = rt.ring_entries() as usize * 4 * 20;
        rt.block_on(async {
            let all = join_all((0..n).map(|_| crate::readable(&event)));
            let ring = async {
                yield_now().await; // all waits have begun
                event.write().expect("write");
            };
            let (results, ()) = futures_util::future::join(all, ring).await;
            assert!(results.into_iter().all(|r| r.is_ok()));
        });
    });
}

#[test]
fn errors_come_as_their_numbers() {
    on_both(&Config::default(), |rt| {
        let read_only = File::new(std::fs::File::open("/dev/null").expect("open").into());
        rt.block_on(async {
            let data = pattern(512, 1).iovec();
            let e =
                fs::write(&read_only, data.clone(), HostOffset::new(0)).await.expect_err("write");
            assert_eq!(e.raw_os_error(), Some(libc::EBADF));
            let e = fs::fallocate(&temp_file(), 0, HostOffset::new(0), ByteLen::new(0)).await;
            assert_eq!(e.expect_err("no length").raw_os_error(), Some(libc::EINVAL));
            let e = fs::read_full(&temp_file(), data, HostOffset::new(u64::MAX - 9)).await;
            assert!(e.is_err());
        });
        let (iov, n) = (std::ptr::null(), 0);
        let mut done = Vec::new();
        // SAFETY: no segments, no memory.
        assert!(unsafe {
            rt.submit_direct(DirectOp::Write, &read_only, iov, n, HostOffset::new(0), 1)
        });
        while done.is_empty() {
            rt.turn(Wait::Forever);
            rt.take_direct(&mut done);
        }
        assert_eq!(done, [(1, -libc::EBADF)]);
    });
}

#[test]
fn fallocate_changes_the_length() {
    on_both(&Config::default(), |rt| {
        let std_file = tempfile::tempfile().expect("temporary file");
        let file = File::new(std_file.try_clone().expect("dup").into());
        rt.block_on(async {
            let (at, len) = (HostOffset::new(0), ByteLen::new(8192));
            fs::fallocate(&file, 0, at, len).await.expect("fallocate");
            fs::fsync(&file, false).await.expect("fsync");
        });
        assert_eq!(std_file.metadata().expect("metadata").len(), 8192);
    });
}

#[test]
fn transfers_with_more_segments_than_the_system_takes_are_continued() {
    on_both(&Config::default(), |rt| {
        let file = temp_file();
        let source = pattern(3000, 9).iovec();
        let mut many = IoVec::default();
        (0..3000).for_each(|i| many.append(source.slice(i, 1)));
        rt.block_on(async {
            fs::write_full(&file, many, HostOffset::new(0)).await.expect("write");
            let back = SharedBuf::zeroed(3000).expect("memory").iovec();
            fs::read_full(&file, back.clone(), HostOffset::new(0)).await.expect("read");
            assert_eq!(bytes_of(&back), bytes_of(&source));
        });
    });
}

/// Polls `f` once and drops it.
async fn start_and_drop<F: Future>(f: F) {
    let mut f = Box::pin(f);
    poll_fn(|cx| {
        let _ = f.as_mut().poll(cx);
        Poll::Ready(())
    })
    .await;
}

#[test]
fn a_dropped_write_still_happens_and_its_memory_lives_until_then() {
    on_both(&tiny(), |rt| {
        let file = temp_file();
        rt.block_on(async {
            for i in 0..50 {
                let data = pattern(4096, i).iovec();
                start_and_drop(fs::write(&file, data, HostOffset::new(u64::from(i) * 4096))).await;
            }
        });
        while rt.in_flight() > 0 {
            rt.turn(Wait::Forever);
        }
        rt.block_on(async {
            for i in 0..50 {
                let back = SharedBuf::zeroed(4096).expect("memory").iovec();
                let at = HostOffset::new(u64::from(i) * 4096);
                fs::read_full(&file, back.clone(), at).await.expect("read");
                assert_eq!(bytes_of(&back), bytes_of(&pattern(4096, i).iovec()));
            }
        });
    });
}

#[test]
fn a_runtime_that_ends_waits_for_its_transfers_and_drops_its_tasks() {
    for backend in [Backend::Threads, Backend::Auto] {
        let std_file = tempfile::tempfile().expect("temporary file");
        let file = File::new(std_file.try_clone().expect("dup").into());
        let alive = Arc::new(());
        let rt = Runtime::new(Config { backend, ..tiny() }).expect("runtime");
        for i in 0..20 {
            let (file, alive) = (file.clone(), alive.clone());
            rt.spawn(async move {
                let data = pattern(512, i).iovec();
                fs::write_full(&file, data, HostOffset::new(u64::from(i) * 512))
                    .await
                    .expect("write");
                std::future::pending::<()>().await;
                drop(alive);
            });
        }
        let never = crate::EventFd::new().expect("eventfd");
        let keep = alive.clone();
        rt.spawn(async move {
            let _ = never.wait().await;
            drop(keep);
        });
        rt.turn(Wait::No);
        drop(rt);
        assert_eq!(Arc::strong_count(&alive), 1);
        assert_eq!(Arc::strong_count(&file), 1);
        assert_eq!(std_file.metadata().expect("metadata").len(), 20 * 512);
        assert!(crate::handle().is_none());
    }
}

#[test]
fn a_thread_has_one_runtime_at_a_time() {
    on_both(&Config::default(), |_rt| {
        let e = Runtime::new(Config::default()).expect_err("second runtime");
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
    });
    on_both(&Config::default(), |_rt| {});
}

/// Tries to take a lock that any other open file description on the same file would prevent.
fn try_lock(file: &std::fs::File) -> bool {
    // SAFETY: all bytes zero is a valid lock description: the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as _;
    // SAFETY: the descriptor is open and `lock` is valid.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) == 0 }
}

#[test]
fn a_dropped_file_is_closed_though_the_ring_had_it_registered() {
    on_both(&Config::default(), |rt| {
        let path = tempfile::NamedTempFile::new().expect("temporary file").into_temp_path();
        let open = || std::fs::File::options().read(true).write(true).open(&path).expect("open");
        let other = open();
        for elsewhere in [false, true] {
            let locked = open();
            assert!(try_lock(&locked));
            let file = File::new(locked.into());
            rt.block_on(async {
                fs::write_full(&file, pattern(512, 1).iovec(), HostOffset::new(0))
                    .await
                    .expect("write");
                assert!(!try_lock(&other));
                if elsewhere {
                    fs::blocking(move || drop(file)).await;
                } else {
                    drop(file);
                }
                yield_now().await;
            });
            assert!(try_lock(&other), "dropped on another thread: {elsewhere}");
            // SAFETY: as in `try_lock`.
            let mut unlock: libc::flock = unsafe { std::mem::zeroed() };
            unlock.l_type = libc::F_UNLCK as _;
            // SAFETY: as in `try_lock`.
            unsafe { libc::fcntl(other.as_raw_fd(), libc::F_OFD_SETLK, &raw const unlock) };
        }
    });
}

#[test]
fn more_files_than_the_table_of_registered_files_work() {
    on_both(&tiny(), |rt| {
        let files: Vec<_> = (0..300).map(|_| temp_file()).collect();
        rt.block_on(async {
            for (i, file) in files.iter().enumerate() {
                fs::write_full(file, pattern(64, i as u8).iovec(), HostOffset::new(0))
                    .await
                    .expect("write");
            }
            for (i, file) in files.iter().enumerate() {
                let back = SharedBuf::zeroed(64).expect("memory").iovec();
                fs::read_full(file, back.clone(), HostOffset::new(0)).await.expect("read");
                assert_eq!(bytes_of(&back), bytes_of(&pattern(64, i as u8).iovec()));
            }
        });
    });
}

#[test]
fn tasks_run_beside_the_future_of_block_on_and_may_spawn_more() {
    on_both(&Config::default(), |rt| {
        let (tx, rx) =
            (std::rc::Rc::new(std::cell::Cell::new(0)), crate::EventFd::new().expect("eventfd"));
        let (count, rx) = (tx.clone(), std::rc::Rc::new(rx));
        let bell = rx.clone();
        rt.spawn(async move {
            for _ in 0..10 {
                let (count, bell) = (count.clone(), bell.clone());
                spawn(async move {
                    yield_now().await;
                    count.set(count.get() + 1);
                    if count.get() == 10 {
                        bell.write().expect("write");
                    }
                });
            }
        });
        assert_eq!(rt.block_on(rx.wait()).expect("wait"), 1);
        assert_eq!(tx.get(), 10);
    });
}

#[test]
fn operations_outside_of_a_runtime_are_errors() {
    let file = temp_file();
    let mut op = pin!(fs::fsync(&file, true));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(matches!(op.as_mut().poll(&mut cx), Poll::Ready(Err(_))));
}
