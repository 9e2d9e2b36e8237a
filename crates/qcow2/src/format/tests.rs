//! Tests of headers and layouts, alone and against QEMU's tools.

use super::*;
use bedplate_types::{ByteLen, ErrorKind, HostOffset};
use proptest::prelude::*;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

/// Runs qemu-img; `None` (and a line on stderr) where it is not installed.
fn qemu_img(dir: &Path, args: &[&str]) -> Option<(bool, String)> {
    match Command::new("qemu-img").current_dir(dir).args(args).output() {
        Ok(out) => {
            let text = [out.stdout, out.stderr].concat();
            Some((out.status.success(), String::from_utf8_lossy(&text).into_owned()))
        }
        Err(e) => {
            eprintln!("SKIPPED: qemu-img can't be run: {e}");
            None
        }
    }
}

fn write_layout(path: &Path, layout: &Layout) {
    let file = std::fs::File::create(path).expect("create");
    file.set_len(layout.file_len.get()).expect("set length");
    for (at, bytes) in &layout.writes {
        file.write_all_at(bytes, at.get()).expect("write");
    }
}

fn cluster(header: &Header) -> Vec<u8> {
    let mut bytes = header.encode().expect("encodes");
    bytes.resize(1 << header.cluster_bits, 0);
    bytes
}

fn sample() -> Header {
    NewImage {
        size: ByteLen::new(10 << 30),
        backing: Some((b"base.img".to_vec(), Some("raw".into()))),
        ..NewImage::default()
    }
    .layout()
    .expect("valid")
    .header
}

/// The sample header with `bytes` put at `at`.
fn patched(at: usize, bytes: &[u8]) -> Result<Header, bedplate_types::Error> {
    let mut c = cluster(&sample());
    c[at..at + bytes.len()].copy_from_slice(bytes);
    Header::parse(&c)
}

#[test]
fn every_bound_of_the_header_is_checked() {
    let cases: &[(&str, usize, &[u8])] = &[
        ("not a qcow2 image", 0, b"QFI\xfa"),
        ("version 4", 4, &[0, 0, 0, 4]),
        ("cluster size", 20, &[0, 0, 0, 8]),
        ("cluster size", 20, &[0, 0, 0, 22]),
        ("cluster size", 20, &[0xff; 4]),
        ("too large for clusters", 24, &[0xff; 8]),
        ("too few for a disk", 24, &[0, 0, 0, 3]),
        ("L1 table has", 36, &[0x01, 0, 0, 0]),
        ("too few for a disk", 36, &[0, 0, 0, 1]),
        ("L1 table's offset", 40, &[0, 0, 0, 0, 0, 4, 2, 0]),
        ("L1 table's offset is zero", 40, &[0; 8]),
        ("ends beyond", 40, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]),
        ("refcount table's offset", 48, &[0, 0, 0, 0, 0, 1, 2, 0]),
        ("ends beyond", 48, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]),
        ("refcount table has", 56, &[0, 0, 0, 129]),
        ("no refcount table", 56, &[0; 4]),
        ("65537 snapshots", 60, &[0, 1, 0, 1]),
        ("snapshot table's offset is zero", 60, &[0, 0, 0, 1]),
        ("snapshot table's offset", 60, &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0]),
        ("bits wide", 96, &[0, 0, 0, 7]),
        ("at least 104", 100, &[0, 0, 0, 96]),
        ("multiple of 8", 100, &[0, 0, 0, 108]),
        ("does not fit in the first cluster", 100, &[0, 2, 0, 0]),
        ("unknown compression type 2", 104, &[2]),
        ("compression type is 1", 104, &[1]),
        ("compression type is 0", 79, &[incompat::COMPRESSION as u8]),
        ("does not end inside", 8, &[0, 0, 0, 0, 0, 0, 0xff, 0xfc]),
        ("outside of the rest", 8, &[0, 0, 0, 0, 0, 0, 0, 111]),
        ("outside of the rest", 8, &[0xff; 8]),
        ("1024 bytes long", 16, &[0, 0, 4, 0]),
        ("header extension", 116, &[0xff; 4]),
        ("header extension", 112, &[1, 2, 3, 4, 0, 1, 0, 0]),
    ];
    for (want, at, bytes) in cases {
        let e = patched(*at, bytes).expect_err(want);
        assert!(e.to_string().contains(want), "{want}: {e}");
        assert!(matches!(e.kind(), ErrorKind::BadImage | ErrorKind::Unsupported), "{want}");
    }
}

#[test]
fn a_cluster_that_is_cut_short_is_an_error_and_not_a_panic() {
    let full = cluster(&sample());
    for len in (0..200).chain([511, 512]) {
        assert!(Header::parse(&full[..len]).is_err(), "{len}");
        let _ = Header::bytes_needed(&full[..len]);
    }
    assert_eq!(Header::bytes_needed(&full[..24]).ok(), Some(65536));
}

#[test]
fn version_2_headers_carry_extensions_too() {
    let mut h = NewImage {
        version: 2,
        size: ByteLen::new(1 << 20),
        backing: Some((b"b".to_vec(), Some("qcow2".into()))),
        ..NewImage::default()
    }
    .layout()
    .expect("valid")
    .header;
    let back = Header::parse(&cluster(&h)).expect("valid");
    assert_eq!(back, h);
    assert_eq!((back.header_length, back.refcount_order), (72, 4));
    assert_eq!(back.backing_format(), Some(&b"qcow2"[..]));
    h.compatible = 1;
    assert!(h.encode().is_err(), "version 2 has no feature bits");
}

#[test]
fn a_size_that_is_no_multiple_of_512_is_cut_as_qemu_cuts_it() {
    let h = patched(24, &1000u64.to_be_bytes()).expect("valid");
    assert_eq!((h.size.get(), h.disk_size().get()), (1000, 512));
}

#[test]
fn long_headers_keep_their_unknown_fields_and_extensions() {
    let mut h = sample();
    h.header_length = 136;
    h.unknown_fields = (0..31).collect();
    h.extensions.insert(0, Extension { id: 0xdead_beef, data: vec![1, 2, 3] });
    h.backing_file = Some(BackingFile { offset: HostOffset::new(0x8000), name: b"b".to_vec() });
    assert_eq!(Header::parse(&cluster(&h)).expect("valid"), h);
}

#[test]
fn disks_too_large_for_their_clusters_are_refused_with_the_maximum() {
    let new = |size: u64, cluster_size| {
        NewImage { size: ByteLen::new(size), cluster_size, ..NewImage::default() }.layout()
    };
    let e = new((128 << 30) + 1, 512).expect_err("too large");
    assert!(e.to_string().contains("the most is 137438953472 bytes; choose a larger"), "{e}");
    assert!(new(128 << 30, 512).is_ok());
    let e = new(u64::MAX, 2 << 20).expect_err("too large");
    assert!(e.to_string().contains("the most is 2305843009213693952 bytes"), "{e}");
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let base = NewImage { size: ByteLen::new(1 << 20), ..NewImage::default() };
    let v2 = NewImage { version: 2, ..base.clone() };
    let long = Some((vec![b'x'; 1024], None));
    let wrong = [
        NewImage { version: 4, ..base.clone() },
        NewImage { cluster_size: 0, ..base.clone() },
        NewImage { cluster_size: 256, ..base.clone() },
        NewImage { cluster_size: 4 << 20, ..base.clone() },
        NewImage { cluster_size: 65537, ..base.clone() },
        NewImage { refcount_bits: 0, ..base.clone() },
        NewImage { refcount_bits: 3, ..base.clone() },
        NewImage { refcount_bits: 128, ..base.clone() },
        NewImage { refcount_bits: 8, ..v2.clone() },
        NewImage { lazy_refcounts: true, ..v2.clone() },
        NewImage { extended_l2: true, ..v2.clone() },
        NewImage { extended_l2: true, cluster_size: 8192, ..base.clone() },
        NewImage { compression_type: CompressionType::Zstd, ..v2 },
        NewImage { backing: long, ..base.clone() },
        NewImage { backing: Some((Vec::new(), None)), ..base.clone() },
        NewImage { backing: Some((vec![b'x'; 500], None)), cluster_size: 512, ..base },
    ];
    for image in wrong {
        let e = image.layout().expect_err("must be refused");
        assert_eq!(e.kind(), ErrorKind::InvalidInput, "{image:?}");
    }
}

#[test]
fn new_images_are_clean_for_qemu() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let base = NewImage { size: ByteLen::new(1 << 30), ..NewImage::default() };
    let mut images = vec![
        base.clone(),
        NewImage { size: ByteLen::ZERO, ..base.clone() },
        NewImage { size: ByteLen::new(1), ..base.clone() },
        NewImage { version: 2, ..base.clone() },
        NewImage { lazy_refcounts: true, ..base.clone() },
        NewImage { compression_type: CompressionType::Zstd, ..base.clone() },
        NewImage { size: ByteLen::new(64 << 40), ..base.clone() },
        NewImage { size: ByteLen::new(2 << 60), cluster_size: 2 << 20, ..base.clone() },
        NewImage {
            size: ByteLen::new(8 << 30),
            cluster_size: 512,
            refcount_bits: 64,
            ..base.clone()
        },
        NewImage { size: ByteLen::new(1 << 40), cluster_size: 4096, ..base.clone() },
        NewImage {
            backing: Some(([b"./".repeat(183).as_slice(), b"base"].concat(), Some("raw".into()))),
            cluster_size: 512,
            ..base.clone()
        },
    ];
    for bits in 9..=21 {
        images.push(NewImage { cluster_size: 1 << bits, ..base.clone() });
    }
    for order in 0..=6 {
        images.push(NewImage { refcount_bits: 1 << order, ..base.clone() });
    }
    std::fs::write(dir.path().join("base"), [0; 512]).expect("write");
    for image in images {
        let layout = image.layout().expect("valid");
        write_layout(&dir.path().join("a.qcow2"), &layout);
        let Some((ok, text)) = qemu_img(dir.path(), &["check", "-f", "qcow2", "a.qcow2"]) else {
            return;
        };
        assert!(ok && text.contains("No errors were found"), "{image:?}: {text}");
        let info = ["info", "-U", "--output=json", "-f", "qcow2", "a.qcow2"];
        let (ok, text) = qemu_img(dir.path(), &info).expect("was there");
        assert!(ok, "{image:?}: {text}");
        let want = [
            format!("\"virtual-size\": {}", layout.header.size.get()),
            format!("\"cluster-size\": {}", image.cluster_size),
            format!("\"compat\": \"{}\"", if image.version == 2 { "0.10" } else { "1.1" }),
            format!("\"compression-type\": \"{}\"", image.compression_type.name()),
            format!("\"refcount-bits\": {}", image.refcount_bits),
            format!("\"lazy-refcounts\": {}", image.lazy_refcounts),
        ];
        let want = if image.version == 2 { &want[..4] } else { &want[..] };
        for w in want {
            assert!(text.contains(w), "{image:?}: {w} not in {text}");
        }
    }
}

#[test]
fn headers_that_qemu_made_parse_and_encode_to_the_same_bytes() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let options = [
        "compat=0.10",
        "compat=1.1",
        "lazy_refcounts=on",
        "compression_type=zstd",
        "cluster_size=512",
        "cluster_size=2M",
        "refcount_bits=1",
        "refcount_bits=64",
        "extended_l2=on",
        "data_file=d,data_file_raw=on",
        "backing_file=base,backing_fmt=raw",
        "compat=0.10,backing_file=base,backing_fmt=raw",
        "cluster_size=512,backing_file=base,backing_fmt=raw",
    ];
    std::fs::write(dir.path().join("base"), [0; 512]).expect("write");
    for o in options {
        let args = ["create", "-q", "-f", "qcow2", "-o", o, "a", "100M"];
        let Some((ok, text)) = qemu_img(dir.path(), &args) else { return };
        assert!(ok, "{o}: {text}");
        let file = std::fs::read(dir.path().join("a")).expect("read");
        let len = Header::bytes_needed(&file).expect("valid");
        let header = Header::parse(&file[..len]).unwrap_or_else(|e| panic!("{o}: {e}"));
        assert_eq!(header.size.get(), 100 << 20, "{o}");
        assert_eq!(header.backing_file.is_some(), o.contains("backing"), "{o}");
        assert!(check_supported(&header, true).is_ok(), "{o}");
        assert_eq!(cluster(&header), &file[..len], "{o}");
    }
}

#[test]
fn snapshot_and_bitmap_tables_that_qemu_made_are_read() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let d = dir.path();
    let Some((ok, text)) = qemu_img(d, &["create", "-q", "-f", "qcow2", "a", "10M"]) else {
        return;
    };
    assert!(ok, "{text}");
    for args in [
        ["snapshot", "-c", "s one", "a"],
        ["snapshot", "-c", "two", "a"],
        ["bitmap", "--add", "a", "b0"],
    ] {
        assert!(qemu_img(d, &args).expect("was there").0);
    }
    let file = std::fs::read(d.join("a")).expect("read");
    let header = Header::parse(&file[..65536]).expect("valid");
    let at = header.snapshots_offset.get() as usize;
    let (list, len) = parse_table(&file[at..], header.nb_snapshots).expect("valid");
    assert_eq!(list.iter().map(|s| &s.name[..]).collect::<Vec<_>>(), [&b"s one"[..], b"two"]);
    assert_eq!(list[0].disk_size, Some(header.size));
    let again: Vec<u8> = list.iter().flat_map(|s| s.encode().expect("encodes")).collect();
    let (back, _) = parse_table(&again, header.nb_snapshots).expect("valid");
    assert_eq!(back, list);
    assert!(again.len() >= len);
    let geometry = header.geometry().expect("valid");
    let data = header.extension(EXT_BITMAPS).expect("there");
    let ext = BitmapExtension::parse(data, geometry).expect("valid");
    let (at, n) = (ext.directory_offset.get() as usize, ext.directory_size as usize);
    let bitmaps = ext.parse_directory(&file[at..at + n], geometry).expect("valid");
    assert_eq!(bitmaps[0].name, b"b0");
    assert!(header.bitmaps_valid());
}

proptest! {
    #[test]
    fn random_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..600), magic: bool, version in 2u8..=3) {
        if magic && bytes.len() > 24 {
            bytes[..8].copy_from_slice(&[b'Q', b'F', b'I', 0xfb, 0, 0, 0, version]);
            bytes[20..24].copy_from_slice(&9u32.to_be_bytes());
        }
        let _ = Header::parse(&bytes);
    }

    #[test]
    fn mutated_headers_parse_within_bounds_or_are_refused(
        changes in proptest::collection::vec((0usize..700, any::<u8>()), 1..6),
    ) {
        let mut c = cluster(&sample());
        for (at, byte) in changes {
            c[at] = byte;
        }
        if let Ok(h) = Header::parse(&c) {
            prop_assert!(u64::from(h.l1_size) * 8 <= bedplate_types::limits::MAX_L1_BYTES);
            prop_assert!(h.extensions.iter().map(|e| e.data.len()).sum::<usize>() <= c.len());
            // What was read can be written, and reads back the same; only the name may have moved.
            let Ok(mut bytes) = h.encode() else { return Ok(()) };
            bytes.resize(1 << h.cluster_bits, 0);
            let mut again = Header::parse(&bytes).expect("own bytes");
            if let (Some(new), Some(old)) = (&mut again.backing_file, &h.backing_file) {
                new.offset = old.offset;
            }
            prop_assert_eq!(again, h);
        }
    }

    #[test]
    fn layouts_count_all_their_clusters(
        size in 0u64..(1 << 50), bits in 9u32..=21, order in 0u32..=6, v2: bool,
    ) {
        let image = NewImage {
            size: ByteLen::new(size.min(1 << (bits * 2 + 18))), version: if v2 { 2 } else { 3 },
            cluster_size: 1 << bits, refcount_bits: if v2 { 16 } else { 1 << order }, ..NewImage::default()
        };
        let Ok(layout) = image.layout() else { return Ok(()) };
        let refcounts = layout.header.refcounts().expect("valid");
        let clusters = layout.file_len.get() >> bits;
        let counted: u64 = layout.writes[2..].iter()
            .map(|(_, block)| (0..refcounts.entries_per_block() as usize).filter(|i| refcounts.get(block, *i) == Some(1)).count() as u64)
            .sum();
        prop_assert_eq!(counted, clusters);
        let l1_end = layout.header.l1_offset.get() + u64::from(layout.header.l1_size) * 8;
        prop_assert!(l1_end <= layout.file_len.get());
    }
}
