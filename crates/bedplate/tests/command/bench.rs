//! `bedplate bench run`.

use super::Bench;
use super::serve::Serving;
use anyhow::{Result, ensure};
use std::fs;

/// Words for a short load.
const SHORT: [&str; 4] = ["--requests", "200", "--depth", "4"];

fn words<'a>(target: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["bench", "run", target][..], &SHORT, more].concat()
}

#[test]
fn nothing_is_overwritten_that_was_not_named_exactly() -> Result<()> {
    let bench = Bench::new()?;
    fs::write(bench.path("a.raw"), vec![5; 1 << 20])?;
    let path = bench.path("a.raw").display().to_string();
    for more in [&[][..], &["--destroy", "a.ra"], &["--destroy", "b.raw"], &["--destroy", &path]] {
        for mix in ["write", "trim", "read=99,trim=1"] {
            let words = words("a.raw", &[more, &["--mix", mix]].concat());
            bench.run(&words)?.fails(1, &["nothing was written", "--destroy 'a.raw'"])?;
        }
    }
    ensure!(fs::read(bench.path("a.raw"))? == vec![5; 1 << 20], "the file was changed");
    bench.run(&words("a.raw", &["--mix", "write", "--destroy", "a.raw"]))?.ok()?;
    ensure!(fs::read(bench.path("a.raw"))? != vec![5; 1 << 20], "nothing was written");
    ensure!(!bench.path("b.raw").exists(), "a file was made");
    Ok(())
}

#[test]
fn a_load_on_a_file_gives_its_outcome_as_text_and_json() -> Result<()> {
    let bench = Bench::new()?;
    fs::write(bench.path("a.raw"), vec![5; 1 << 20])?;
    let mixed = ["--mix", "read=50,write=40,flush=10", "--verify", "all", "--destroy", "a.raw"];
    for engine in [&["--engine", "psync", "--depth", "1", "--buffered"][..], &[]] {
        let words = [&["bench", "run", "a.raw", "--requests", "300"][..], &mixed, engine].concat();
        let text = bench.run(&words)?.ok()?.out;
        ensure!(text.contains("0 corrupt") && text.contains("p99.9"), "{text}");
        let json = bench.run(&[&words[..], &["--json"]].concat())?.ok()?.json()?;
        ensure!(json["version"] == 1, "{json}");
        let outcome = &json["runs"][0]["outcome"];
        ensure!(outcome["requests"] == 300 && outcome["errors"] == 0, "{outcome}");
        let ops = outcome["ops"].as_array().map_or(0, Vec::len);
        ensure!(ops == 3 && outcome["verified"]["corrupt"] == 0, "{outcome}");
        ensure!(json["environment"]["kernel"].is_string(), "{json}");
    }
    let empty = ["bench", "run", "none.raw"];
    bench.run(&empty)?.fails(1, &["none.raw", "No such file"])?;
    bench.run(&words("a.raw", &["--region", "2M"]))?.fails(1, &["1048576 bytes"])?;
    bench.run(&words("a.raw", &["--block", "1000"]))?.fails(1, &["multiple of 512"])
}

#[test]
fn options_that_would_do_nothing_are_refused() -> Result<()> {
    let bench = Bench::new()?;
    fs::write(bench.path("a.raw"), vec![5; 1 << 20])?;
    let run = |words: &[&str]| bench.run(&[&["bench", "run"], words].concat());
    run(&["a.raw", "--spin", "5"])?.fails(1, &["--spin is for vhost-user-blk"])?;
    for option in [&["--buffered"][..], &["--engine", "psync"]] {
        for target in ["vhost-user-blk:./v", "nbd:unix:./n"] {
            run(&[&[target], option].concat())?.fails(1, &["for files and devices"])?;
        }
        let ended = run(&[&["--fio", "jobs.fio"], option].concat())?;
        ensure!(ended.code == 2 && ended.err.contains("TARGET"), "{ended:?}");
    }
    for option in ["--depth=3", "--seconds=1", "--mix=read", "--flush-alone", "--verify=all"] {
        let ended = run(&["a.raw", "--fio", "jobs.fio", option])?;
        ensure!(ended.code == 2 && ended.err.contains("cannot be used with"), "{ended:?}");
    }
    Ok(())
}

#[test]
fn exports_are_loaded_and_their_content_checked() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "d.qcow2", "64M"])?.ok()?;
    let serve = ["d.qcow2", "--vhost-user-blk", "./v", "--queues", "2", "--nbd", "./n"];
    let served = Serving::start(&bench, &serve)?;
    let pid = served.child.id().to_string();
    let mixed = ["--mix", "read=40,write=40,trim=10,flush=10", "--verify", "all", "--jobs", "2"];
    for (target, name) in [("vhost-user-blk:./v", "./v"), ("nbd:unix:./n", "./n")] {
        let mixed = [&mixed[..], &["--server-pid", &pid, "--json"]].concat();
        bench.run(&words(target, &mixed))?.fails(1, &["nothing was written", name])?;
        let words = words(target, &[&mixed[..], &["--destroy", name]].concat());
        let json = bench.run(&words)?.ok()?.json()?;
        let outcome = &json["runs"][0]["outcome"];
        ensure!(outcome["requests"] == 400 && outcome["errors"] == 0, "{outcome}");
        ensure!(outcome["verified"]["units"].as_u64() > Some(100), "{outcome}");
        ensure!(outcome["cpu"]["server_s"].as_f64() > Some(0.0), "{outcome}");
        ensure!(json["runs"][0]["size"] == 64 << 20, "{json}");
    }
    served.stop()?;
    bench.run(&["check", "d.qcow2"])?.ok()?;
    Ok(())
}
