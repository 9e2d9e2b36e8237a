//! Images encrypted with LUKS: QEMU's and Bedplate's own, read and written by both in turn.

use crate::harness::{Folder, churn, memory, noise, run, same, verify, write};
use crate::refused::refuses;
use crate::tools::{create, have_qemu, peek, poke, qemu_writes};
use anyhow::{Context, Result, ensure};
use bedplate_disk::{Disk, Layer};
use bedplate_qcow2::check::{CheckOptions, check};
use bedplate_qcow2::format::{LuksCipher, LuksHash, LuksIv, LuksSuite, NewImage};
use bedplate_qcow2::{NewSnapshot, OpenOptions, Passphrase, Qcow2, new_luks_area};
use bedplate_runtime::buf::SharedBuf;
use bedplate_storage::{FileStorage, OpenOptions as FileOptions, Storage};
use bedplate_tests::host;
use bedplate_tests::random::Random;
use bedplate_types::{ByteLen, CacheMode, ErrorKind, HostOffset, Preallocation};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const KEY: &str = "correct horse\nbattery staple";
const SIZE: u64 = (4 << 20) + 512;

fn passphrase(text: &str) -> Result<Passphrase> {
    Ok(Passphrase::new(text.as_bytes().to_vec())?)
}

/// An image, and a file with its passphrase beside it.
struct Encrypted {
    folder: Folder,
    image: PathBuf,
}

impl Encrypted {
    fn new() -> Result<Self> {
        let folder = Folder::new()?;
        std::fs::write(folder.path("key"), KEY)?;
        let image = folder.path("image");
        Ok(Self { folder, image })
    }

    /// One that QEMU has made.
    fn by_qemu(options: &str) -> Result<Self> {
        let new = Self::new()?;
        let all =
            format!("encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10,{options}");
        let mut tool = new.tool("qemu-img", &["create", "-q", "-f", "qcow2"]);
        tool.args(["-o", &all]).arg(&new.image).arg(SIZE.to_string());
        host::run(&mut tool)?;
        Ok(new)
    }

    /// One that Bedplate has made.
    fn by_bedplate(suite: LuksSuite, new: &NewImage) -> Result<Self> {
        let made = Self::new()?;
        let luks = new_luks_area(suite, Duration::from_millis(1), &passphrase(KEY)?)?;
        let layout = NewImage { luks: Some(luks), ..new.clone() }.layout()?;
        run(async || {
            let how = FileOptions::new(&made.image);
            let storage = FileStorage::create(&how, layout.file_len)?;
            for (at, bytes) in &layout.writes {
                storage.write(*at, memory(bytes)?).await?;
            }
            Ok(storage.sync().await?)
        })?;
        Ok(made)
    }

    fn tool(&self, name: &str, words: &[&str]) -> Command {
        let mut tool = host::tool(name);
        // Its many threads for encryption would each take address space, of which this process leaves little.
        tool.env("MALLOC_ARENA_MAX", "1");
        // qemu-io takes objects first, qemu-img behind its command.
        if let Some(first) = words.first() {
            tool.arg(first);
        }
        let key = self.folder.path("key");
        tool.arg("--object").arg(format!("secret,id=s,file={}", key.display()));
        tool.args(words.iter().skip(1));
        tool
    }

    fn options(&self) -> String {
        format!("driver=qcow2,encrypt.key-secret=s,file.filename={}", self.image.display())
    }

    fn qemu_img(&self, words: &[&str], after: &[&str]) -> Result<()> {
        let mut tool = self.tool("qemu-img", words);
        host::run(tool.arg("--image-opts").arg(self.options()).args(after)).map(drop)
    }

    fn qemu_io(&self, commands: &[String]) -> Result<()> {
        let mut tool = self.tool("qemu-io", &[]);
        tool.args(["-d", "unmap", "--image-opts", &self.options()]);
        for command in commands {
            tool.args(["-c", command]);
        }
        let text = host::run(&mut tool)?;
        ensure!(!text.contains("failed"), "qemu-io:\n{text}");
        Ok(())
    }

    /// What QEMU reads.
    fn content(&self, words: &[&str]) -> Result<Vec<u8>> {
        let out = self.folder.path("out");
        let all = [&["convert", "-m", "1", "-O", "raw"], words].concat();
        self.qemu_img(&all, &[&out.display().to_string()])?;
        Ok(std::fs::read(out)?)
    }

    async fn open(&self, read_only: bool) -> Result<Disk<FileStorage>> {
        let storage = FileStorage::open(&FileOptions::new(&self.image).read_only(read_only))?;
        // Wrong ones are tried as well.
        let passphrases = vec![passphrase("another")?, passphrase(KEY)?];
        let options = OpenOptions { read_only, passphrases, ..OpenOptions::default() };
        let layer = Layer::Qcow2(Arc::new(Qcow2::open(storage, &options).await?));
        Ok(Disk::new("disk", vec![layer], read_only, CacheMode::None)?)
    }

    fn clean(&self) -> Result<()> {
        self.qemu_img(&["check", "-q"], &[]).context("QEMU's check")?;
        run(async || {
            let storage = FileStorage::open(&FileOptions::new(&self.image).read_only(true))?;
            let report = check(&storage, CheckOptions::default()).await?;
            ensure!(report.is_clean(), "Bedplate's check: {report:?}");
            Ok(())
        })
    }

    /// Read, written and read again by Bedplate, then checked and read by QEMU; twice.
    fn exercise(&self, random: &mut Random) -> Result<()> {
        let mut model = self.content(&[])?;
        run(async || verify(&self.open(true).await?, &model).await)
            .context("reading what QEMU reads")?;
        for rounds in [10, 4] {
            run(async || {
                let disk = self.open(false).await?;
                churn(&disk, &mut model, random, rounds).await?;
                verify(&disk, &model).await.context("reading back before the close")?;
                Ok(disk.close().await?)
            })?;
            self.clean()?;
            same(&model, &self.content(&[])?).context("reading by QEMU what Bedplate wrote")?;
        }
        Ok(())
    }
}

#[test]
fn encrypted_images_of_qemus_are_read_and_written() -> Result<()> {
    if !have_qemu("encrypted_images_of_qemus_are_read_and_written") {
        return Ok(());
    }
    let kinds = [
        "cluster_size=65536",
        "cluster_size=512,encrypt.cipher-alg=aes-128,encrypt.hash-alg=sha1",
        "cluster_size=4096,encrypt.hash-alg=sha512,encrypt.ivgen-alg=plain",
        "cluster_size=2M,compat=0.10",
        "cluster_size=16384,extended_l2=on",
    ];
    for (seed, options) in kinds.into_iter().enumerate() {
        let tried = (|| {
            let mut random = Random::new(seed as u64 + 700);
            let image = Encrypted::by_qemu(options)?;
            // Compressed clusters lie there in clear.
            image.qemu_io(&["write -c -P 77 2M 2M".to_owned()])?;
            image.qemu_io(&qemu_writes(&mut random, 20, SIZE))?;
            image.exercise(&mut random)
        })();
        tried.with_context(|| options.to_owned())?;
    }
    Ok(())
}

#[test]
fn encrypted_images_of_bedplates_are_qemus_too() -> Result<()> {
    if !have_qemu("encrypted_images_of_bedplates_are_qemus_too") {
        return Ok(());
    }
    let base = NewImage { size: ByteLen::new(SIZE), ..NewImage::default() };
    let old = LuksSuite { cipher: LuksCipher::Aes128, iv: LuksIv::Plain, hash: LuksHash::Sha1 };
    let kinds = [
        (LuksSuite::default(), NewImage { cluster_size: 512, ..base.clone() }),
        (LuksSuite { hash: LuksHash::Sha512, ..old }, NewImage { version: 2, ..base.clone() }),
        (old, NewImage { cluster_size: 32768, extended_l2: true, ..base }),
    ];
    for (seed, (suite, new)) in kinds.iter().enumerate() {
        let tried = (|| {
            let mut random = Random::new(seed as u64 + 710);
            let image = Encrypted::by_bedplate(*suite, new)?;
            image.clean()?;
            ensure!(image.content(&[])?.iter().all(|byte| *byte == 0), "a new image is not empty");
            image.qemu_io(&qemu_writes(&mut random, 10, SIZE))?;
            image.exercise(&mut random)
        })();
        tried.with_context(|| format!("{suite:?}, {new:?}"))?;
    }
    Ok(())
}

#[test]
fn encrypted_space_taken_ahead_reads_as_zeroes() -> Result<()> {
    if !have_qemu("encrypted_space_taken_ahead_reads_as_zeroes") {
        return Ok(());
    }
    let base = NewImage { size: ByteLen::new(SIZE), ..NewImage::default() };
    for extended_l2 in [false, true] {
        let new = NewImage { extended_l2, ..base.clone() };
        let image = Encrypted::by_bedplate(LuksSuite::default(), &new)?;
        run(async || {
            let storage = FileStorage::open(&FileOptions::new(&image.image))?;
            let options = OpenOptions { metadata_only: true, ..OpenOptions::default() };
            let qcow2 = Qcow2::open(storage, &options).await?;
            qcow2.preallocate(Preallocation::Metadata).await?;
            let buf = SharedBuf::zeroed(512)?.iovec();
            let denied = qcow2.read_data(HostOffset::ZERO, buf).await;
            ensure!(denied.is_err_and(|e| e.kind() == ErrorKind::Denied), "data without a key");
            Ok(qcow2.close().await?)
        })?;
        ensure!(image.content(&[])?.iter().all(|byte| *byte == 0), "QEMU reads no zeroes");
        image.exercise(&mut Random::new(720))?;
    }
    Ok(())
}

#[test]
fn snapshots_of_encrypted_images_keep_what_they_held() -> Result<()> {
    if !have_qemu("snapshots_of_encrypted_images_keep_what_they_held") {
        return Ok(());
    }
    let mut random = Random::new(730);
    let image = Encrypted::by_qemu("cluster_size=4096")?;
    image.qemu_io(&qemu_writes(&mut random, 30, SIZE))?;
    image.qemu_img(&["snapshot", "-c", "theirs"], &[])?;
    let theirs = image.content(&[])?;
    image.exercise(&mut random)?;
    let ours = image.content(&[])?;
    run(async || {
        let storage = FileStorage::open(&FileOptions::new(&image.image))?;
        let options = OpenOptions { metadata_only: true, ..OpenOptions::default() };
        let qcow2 = Qcow2::open(storage, &options).await?;
        let new = NewSnapshot { name: b"ours", date: Duration::from_secs(1) };
        qcow2.create_snapshot(&new).await?;
        Ok(qcow2.close().await?)
    })?;
    image.exercise(&mut random)?;
    same(&theirs, &image.content(&["-l", "theirs"])?).context("QEMU's snapshot has changed")?;
    same(&ours, &image.content(&["-l", "ours"])?).context("Bedplate's snapshot has changed")
}

#[test]
fn nothing_of_the_data_lies_in_the_file_in_clear() -> Result<()> {
    let new = NewImage { size: ByteLen::new(SIZE), ..NewImage::default() };
    let image = Encrypted::by_bedplate(LuksSuite::default(), &new)?;
    let text = noise(&mut Random::new(740), 512);
    run(async || {
        let disk = image.open(false).await?;
        for at in [0, 100_000, 200_003] {
            write(&disk, at, &text).await?;
        }
        Ok(disk.close().await?)
    })?;
    let file = std::fs::read(&image.image)?;
    ensure!(!file.windows(16).any(|part| part == &text[..16]), "the data is there in clear");
    Ok(())
}

fn refused(image: &Encrypted, why: &str) -> Result<()> {
    for read_only in [true, false] {
        let before = std::fs::read(&image.image)?;
        let opened = run(async || image.open(read_only).await.map(drop));
        let text = format!("{:#}", opened.err().context("it was opened")?);
        ensure!(text.contains(why), "the sentence does not speak of {why:?}: {text}");
        ensure!(std::fs::read(&image.image)? == before, "opening changed the file");
    }
    Ok(())
}

#[test]
fn damaged_and_hostile_encryption_headers_are_refused_in_short_time() -> Result<()> {
    let new = NewImage { size: ByteLen::new(SIZE), ..NewImage::default() };
    let image = Encrypted::by_bedplate(LuksSuite::default(), &new)?;
    let find = |bytes: &[u8], from: usize| -> Result<u64> {
        let file = std::fs::read(&image.image)?;
        let found = file[from..].windows(bytes.len()).position(|part| part == bytes);
        Ok((from + found.context("it is not in the file")?) as u64)
    };
    let extension = find(&0x0537_be77_u32.to_be_bytes(), 0)? + 8;
    let luks = u64::from_be_bytes(peek(&image.image, extension)?);
    ensure!(find(b"LUKS\xba\xbe", 0)? == luks);
    let slot = luks + 208;
    let cases: [(&str, u64, &[u8], &str); 15] = [
        ("no magic", luks, b"SKUL", "not one of LUKS"),
        ("version 2", luks + 6, &[0, 2], "version 2"),
        ("a cipher", luks + 8, b"serpent", "serpent-xts-plain64"),
        ("a hash", luks + 72, b"whirlpool", "whirlpool"),
        ("a long key", luks + 108, &[0xff; 4], "4294967295 bytes"),
        ("no rounds", slot + 4, &[0; 4], "no rounds"),
        ("all rounds", slot + 4, &[0xff; 4], "rounds"),
        ("all rounds of the digest", luks + 164, &[0xff; 4], "rounds"),
        ("a slot's state", slot + 48, &[1; 4], "neither in use nor free"),
        ("far key material", slot + 40, &[0xff; 4], "outside"),
        ("stripes", slot + 44, &[0xff; 4], "stripes"),
        ("a changed salt", slot + 8, &[1; 32], "passphrase"),
        ("its place", extension, &[0xff; 8], "can't lie"),
        ("a place beyond the file", extension, &[0, 0, 0xff, 0, 0, 0, 0, 0], "not one of LUKS"),
        ("its length", extension + 8, &[0xff; 8], "can't lie"),
    ];
    let whole = std::fs::read(&image.image)?;
    for (name, at, bytes, why) in cases {
        poke(&image.image, at, bytes)?;
        refused(&image, why).with_context(|| name.to_owned())?;
        std::fs::write(&image.image, &whole)?;
    }
    // On top of another structure it must not be written over.
    poke(&image.image, extension, &(1_u64 << 16).to_be_bytes())?;
    refused(&image, "not one of LUKS")?;
    std::fs::write(&image.image, &whole)?;
    run(async || image.open(true).await.map(drop)).context("as it was")
}

#[test]
fn an_image_that_only_says_that_it_is_encrypted_is_refused() -> Result<()> {
    if !have_qemu("an_image_that_only_says_that_it_is_encrypted_is_refused") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image: &Path = &folder.path("image");
    create(image, "compat=1.1", 1 << 20)?;
    poke(image, 32, &2_u32.to_be_bytes())?;
    refuses(image, false, "but not where")?;
    refuses(image, true, "but not where")
}
