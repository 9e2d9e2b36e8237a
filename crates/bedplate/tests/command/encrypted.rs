//! Encrypted images: passphrases from files and descriptors, and what is said without one.

use super::Bench;
use anyhow::{Result, ensure};
use bedplate_tests::has_or_skip;
use std::fs::File;

const CREATE: &[&str] = &["create", "-q", "-o", "encrypt.format=luks,encrypt.iter-time=1"];

/// A folder with an encrypted image and its passphrase.
fn bench() -> Result<Bench> {
    let bench = Bench::new()?;
    std::fs::write(bench.path("key"), "abc")?;
    std::fs::write(bench.path("wrong"), "abc\n")?;
    bench.run(&[CREATE, &["--key-file", "key", "a.qcow2", "4M"]].concat())?.ok()?;
    Ok(bench)
}

#[test]
fn an_encrypted_image_is_used_with_its_passphrase_and_refused_without() -> Result<()> {
    let bench = bench()?;
    let io = ["qemu-io", "--key-file", "key", "-c", "write -P 7 1M 70000", "a.qcow2"];
    bench.run(&io)?.ok()?;
    // By QEMU's words, and after a wrong one.
    let read = ["-c", "read -P 7 1M 70000", "-c", "read -P 0 0 1M"];
    let object = ["--object", "secret,id=s,file=key", "--image-opts"];
    let opts = ["driver=qcow2,file.filename=a.qcow2,encrypt.key-secret=s"];
    bench.run(&[&["qemu-io"][..], &object, &read, &opts].concat())?.ok()?;
    let both = ["qemu-io", "--key-file", "wrong", "--key-file", "key"];
    bench.run(&[&both[..], &read, &["a.qcow2"]].concat())?.ok()?;
    let mut piped =
        bench.command(&[&["qemu-io", "--key-fd", "0"][..], &read, &["a.qcow2"]].concat());
    let status =
        piped.stdin(File::open(bench.path("key"))?).stdout(std::process::Stdio::null()).status()?;
    ensure!(status.success(), "with the passphrase on a descriptor");

    let serve = ["serve", "--state-dir", "none", "--nbd", "unix:./nbd", "a.qcow2"];
    bench.refuses(&[&serve[..], &["--key-file", "wrong"]].concat(), 1, &["newline"])?;
    bench.refuses(&["resize", "a.qcow2", "8M"], 1, &["--key-file", "--key-fd"])?;
    bench.refuses(&["resize", "--key-file", "nothing", "a.qcow2", "8M"], 1, &["'nothing'"])?;
    bench.refuses(&["resize", "--key-fd", "999", "a.qcow2", "8M"], 1, &["descriptor 999"])?;
    bench.run(&["resize", "--key-file", "key", "a.qcow2", "8M"])?.ok()?;
    // What is about metadata alone needs no key.
    for words in [
        &["snapshot", "-c", "one", "a.qcow2"][..],
        &["snapshot", "-d", "one", "a.qcow2"],
        &["map", "a.qcow2"],
        &["check", "a.qcow2"],
    ] {
        bench.run(words)?.ok()?;
    }
    bench.run(&[&both[..], &read, &["a.qcow2"]].concat())?.ok().map(drop)
}

#[test]
fn mistakes_in_the_options_of_an_encryption_are_named() -> Result<()> {
    let bench = bench()?;
    let refuses = |options: &str, key: bool, words: &[&str]| {
        let key = if key { &["--key-file", "key"][..] } else { &[] };
        bench.refuses(&[&["create", "-o", options], key, &["b.qcow2", "1M"]].concat(), 1, words)
    };
    refuses("encrypt.format=luks", false, &["--key-file"])?;
    refuses("encrypt.cipher-alg=aes-128", false, &["encrypt.format=luks"])?;
    refuses("cluster_size=64k", true, &["encrypt.format=luks"])?;
    refuses("encrypt.format=luks,encrypt.key-secret=s", true, &["--key-file"])?;
    refuses("encrypt.format=aes", true, &["old AES"])?;
    refuses("encryption=on", true, &["old AES"])?;
    refuses("encrypt.format=luks,encrypt.cipher-alg=serpent-256", true, &["aes-256, aes-128"])?;
    refuses("encrypt.format=luks,encrypt.cipher-mode=cbc", true, &["xts"])?;
    refuses("encrypt.format=luks,encrypt.iter-time=0", true, &["milliseconds"])?;
    refuses("encrypt.format=luks,compat=0.10,preallocation=full", true, &["compat=0.10"])?;
    std::fs::write(bench.path("key"), "")?;
    refuses("encrypt.format=luks", true, &["'key' gives no passphrase"])
}

#[test]
fn an_encryption_is_described_as_qemu_img_does() -> Result<()> {
    if !has_or_skip("an_encryption_is_described_as_qemu_img_does", "qemu-img") {
        return Ok(());
    }
    let bench = bench()?;
    let secret = ["create", "-q", "-f", "qcow2", "--object", "secret,id=s,file=key", "-o"];
    let option = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10,encrypt.hash-alg=sha512,\
                  encrypt.cipher-alg=twofish-256,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,\
                  encrypt.ivgen-hash-alg=sha256";
    bench.tool("qemu-img", &[&secret[..], &[option, "b.qcow2", "1M"]].concat())?;
    for name in ["a.qcow2", "b.qcow2"] {
        let peer = bench.tool_json("qemu-img", &["info", "--output=json", name])?;
        let ours = bench.run(&["info", "--json", name])?.ok()?.json()?;
        let encryption = "/format-specific/data/encrypt";
        assert_eq!(ours.pointer(encryption), peer.pointer(encryption), "{name}");
        ensure!(ours.pointer(encryption).is_some(), "{name} is not described");
        let can = ours.get("unsupported").is_none();
        assert_eq!(can, name == "a.qcow2", "{name}");
        let text = |words: &str| -> String {
            let lines = words.lines().skip_while(|line| !line.contains("encrypt:"));
            lines.take_while(|line| !line.contains("corrupt:")).collect::<Vec<_>>().join("\n")
        };
        let peer = bench.tool("qemu-img", &["info", name])?;
        assert_eq!(text(&bench.run(&["info", name])?.ok()?.out), text(&peer), "{name}");
    }
    bench.refuses(
        &["resize", "--key-file", "key", "b.qcow2", "2M"],
        1,
        &["twofish-cbc-essiv:sha256"],
    )
}
