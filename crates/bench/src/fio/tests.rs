//! Job files as people write them.

use super::*;
use crate::job::{Arrival, Extent, Mix, Pattern, Share, SizeShare, Sizes, Verify};
use crate::target::Engine;

fn one(text: &str) -> (Target, Job) {
    let jobs = read_fio(text, None, false).expect("read");
    jobs.groups[0][0].clone()
}

#[test]
fn a_usual_job_is_read_with_fio_s_defaults() {
    let (target, job) = one("\
[global]
ioengine=io_uring  ; a comment
; another
direct=1
filename=/dev/nvme0n1
# another
[rand]
rw=randrw
rwmixread=70
bs=8k
iodepth=32
numjobs=4
size=10g
offset=1m
runtime=60
time_based
ramp_time=5s
fsync=16 # for safety
end_fsync=1
randseed=9
group_reporting
");
    let wanted =
        Target::File { path: "/dev/nvme0n1".into(), engine: Engine::IoUring, direct: true };
    assert_eq!(target, wanted);
    assert_eq!(job.mix, Mix { read: 70, write: 30, trim: 0, flush: 0 });
    assert_eq!((job.pattern, job.sizes.clone()), (Pattern::Random, Sizes::Fixed { bytes: 8192 }));
    assert_eq!((job.depth, job.threads, job.share, job.batch + job.reap), (32, 4, Share::Whole, 2));
    assert_eq!((job.offset, job.region, job.seed), (1 << 20, Some(10 << 30), 9));
    assert_eq!((job.extent, job.warm_up), (Extent::Time { seconds: 65.0 }, 5.0));
    assert_eq!((job.flush.requests, job.final_flush, job.name.as_str()), (Some(16), true, "rand"));
    assert!(job.validate().is_ok());
}

#[test]
fn a_job_without_a_time_is_a_pass_and_psync_has_depth_1() {
    let (target, job) = one("[a]\nrw=write\nfilename=f\niodepth=16\nverify=crc32c\n");
    let wanted = Target::File { path: "f".into(), engine: Engine::Psync, direct: false };
    assert_eq!((target, job.depth), (wanted, 1));
    assert_eq!((job.pattern, job.extent), (Pattern::Sequential, Extent::Pass { limit: None }));
    assert_eq!(job.verify, Verify { reads: true, afterwards: true });
}

#[test]
fn sizes_distributions_rates_and_nbd_are_read() {
    let time = "time_based\nruntime=500ms\n";
    let (target, job) = one(&format!(
        "[a]\nioengine=nbd\nuri=nbd+unix:///x?socket=/run/s\nrw=randread\nbssplit=4k/70:64k/:8kib/\n\
         random_distribution=zipf:1.1\niodepth=4\nrate_iops=2k\nnumjobs=2\n{time}"
    ));
    assert_eq!(target, Target::Nbd { address: "unix:/run/s".into(), export: "x".into() });
    let part = |bytes, percent| SizeShare { bytes, percent };
    let parts = vec![part(4096, 70), part(65536, 15), part(8192, 15)];
    assert_eq!(job.sizes, Sizes::Split { parts });
    assert_eq!(job.pattern, Pattern::Zipf { theta: 1.1 });
    assert_eq!(job.arrival, Arrival::Open { rate: 4096.0, poisson: false });
    assert_eq!(job.extent, Extent::Time { seconds: 0.5 });
    let (_, job) = one(&format!(
        "[a]\nfilename=f\nrw=randwrite\nbsrange=4k-16k\nrandom_distribution=zoned:90/10:10/90\nthinktime=20ms\n{time}"
    ));
    assert_eq!(job.sizes, Sizes::Range { min: 4096, max: 16384 });
    assert_eq!(job.pattern, Pattern::HotCold { space: 10, load: 90 });
    assert_eq!(job.arrival, Arrival::Closed { think: 0.02 });
}

#[test]
fn groups_run_after_each_other_and_a_target_may_be_given() {
    let text = "[a]\nrw=read\n[b]\nrw=read\n[c]\nstonewall\nrw=read\n";
    assert!(read_fio(text, None, false).expect_err("no file").to_string().contains("filename"));
    let target = Target::parse("vhost-user-blk:/run/v").expect("a target");
    let jobs = read_fio(text, Some(&target), false).expect("read");
    let sizes: Vec<usize> = jobs.groups.iter().map(Vec::len).collect();
    assert_eq!(sizes, [2, 1]);
    assert!(jobs.groups.iter().flatten().all(|(one, _)| *one == target));
}

#[test]
fn what_is_lacking_is_named_with_its_line() {
    let text = "[a]\nfilename=f\nrw=randread:8\nioengine=libaio\nloops=3\nbs=4k,8k\n";
    let error = read_fio(text, None, false).expect_err("lacking").to_string();
    for word in ["line 3: 'rw=randread:8'", "libaio", "line 5: 'loops=3'", "line 6: 'bs=4k,8k'"] {
        assert!(error.contains(word), "{word}: {error}");
    }
    let jobs = read_fio(text, None, true).expect("left out");
    assert_eq!((jobs.ignored.len(), jobs.groups.len()), (4, 1), "{:?}", jobs.ignored);
    for (wrong, word) in [
        ("[a]\nfilename=f\nbs=4q\n", "line 3"),
        ("[a\n", "section"),
        ("rw=read\n", "no job"),
        ("[a]\nfilename=f\nruntime=5x\n", "time"),
    ] {
        let error = read_fio(wrong, None, true).expect_err("wrong").to_string();
        assert!(error.contains(word), "{error}");
    }
}
