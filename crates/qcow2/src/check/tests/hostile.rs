//! Images made to take much time or memory: both stay bounded. Time is bounded by what is read and by steps that end in a
//! `Limit`, so these tests would not end if it were not.

use super::*;
use crate::format::{COPIED, Snapshot};
use bedplate_sim::OpKind;
use bedplate_types::{ErrorKind, HostOffset};

/// An image of 512-byte clusters with a long, sparse file, and the places of its tables.
fn sparse(len: u64) -> (Image, Header) {
    let new = NewImage { size: ByteLen::new(64 << 30), cluster_size: 512, ..NewImage::default() };
    let layout = new.layout().expect("valid");
    let mut image = Image::new(len);
    for (at, bytes) in &layout.writes {
        image.write(at.get(), bytes);
    }
    (image, layout.header)
}

fn write_words(image: &mut Image, at: u64, words: impl Iterator<Item = u64>) {
    let bytes: Vec<u8> = words.flat_map(u64::to_be_bytes).collect();
    image.write(at, &bytes);
}

/// Checks and repairs; returns the bytes read by the check.
fn survives(image: &Image) -> (Result<CheckReport>, u64) {
    let storage = SimStorage::from_image(image.clone(), SimOptions::default());
    let report = block_on(check(&storage, CheckOptions::default()));
    let read = storage.counts().read_bytes;
    for what in [Repair::Leaks, Repair::All] {
        storage.reset_counts();
        let done = block_on(repair(&storage, what, CheckOptions::default()));
        let written = storage.counts().written_bytes;
        assert!(written < 256 << 20, "{what:?} has written {written} bytes: {done:?}");
    }
    (report, read)
}

#[test]
fn tables_in_holes_are_not_read() {
    let (mut image, header) = sparse(1 << 44);
    // A million L2 tables where there is nothing.
    let entries = u64::from(header.l1_size).min(1 << 20);
    let tables = (0..entries).map(|i| COPIED | ((1 << 40) + i * 512));
    write_words(&mut image, header.l1_offset.get(), tables);
    let (report, read) = survives(&image);
    assert!(report.expect("can be checked").corruptions >= entries);
    assert!(read < 600 << 20, "{read} bytes were read");
}

#[test]
fn references_far_apart_take_little_memory_and_end() {
    let (mut image, header) = sparse(1 << 54);
    let l1 = header.l1_offset.get();
    let table = 1u64 << 30;
    for n in 0..64u64 {
        write_words(&mut image, l1 + 8 * n, [COPIED | (table + n * 512)].into_iter());
        let far = (0..64).map(|i| COPIED | ((n * 64 + i) << 41) | 1 << 40);
        write_words(&mut image, table + n * 512, far);
    }
    let (report, _) = survives(&image);
    assert_eq!(report.map(|_| ()).map_err(|e| e.kind()), Err(ErrorKind::Limit));
}

#[test]
fn blocks_that_are_named_a_million_times_are_read_once() {
    let new = NewImage { size: ByteLen::new(1 << 50), ..NewImage::default() };
    let layout = new.layout().expect("valid");
    let mut image = Image::new(1 << 49);
    for (at, bytes) in &layout.writes {
        image.write(at.get(), bytes);
    }
    let table = layout.header.refcount_table_offset.get();
    let full = 64u64 << 20;
    image.write(full, &[1; 65536]);
    image.write(full + 65536, &[2; 65536]);
    write_words(&mut image, table + 8, (0..1 << 17).map(|i| full + (i & 1) * 65536));
    let storage = SimStorage::from_image(image, SimOptions::default());
    let report = block_on(check(&storage, CheckOptions::default())).expect("can be checked");
    assert_eq!(report.leaks, 1 << 32);
    assert!(storage.counts().of(OpKind::Read) < 10_000, "{:?}", storage.counts());
}

#[test]
fn snapshots_that_share_or_overlap_their_tables_are_no_more_work_than_their_bytes() {
    let (image, mut header) = sparse(1 << 30);
    let place = 64u64 << 20;
    let list = |each: &dyn Fn(u64) -> (u64, u64)| -> Vec<u8> {
        (0..20_000)
            .flat_map(|n| {
                let (at, entries) = each(n);
                let snapshot = Snapshot {
                    l1_offset: HostOffset::new(at),
                    l1_size: entries as u32,
                    id: b"1".to_vec(),
                    ..Snapshot::default()
                };
                snapshot.encode().expect("short")
            })
            .collect()
    };
    header.nb_snapshots = 20_000;
    header.snapshots_offset = HostOffset::new(place);
    // All at one place, each longer than the last.
    let mut shared = image.clone();
    shared.write(0, &header.encode().expect("fits"));
    shared.write(place, &list(&|n| (256 << 20, 100 + n * 200)));
    let data: Vec<u8> = (0..1u64 << 17).flat_map(|i| ((i + 8) * 512).to_be_bytes()).collect();
    shared.write(256 << 20, &data);
    let (report, read) = survives(&shared);
    assert!(report.is_ok() && read < 200 << 20, "{read} bytes: {report:?}");
    // Each a cluster behind the last, and all of them long.
    let mut overlapping = shared;
    overlapping.write(place, &list(&|n| ((256 << 20) + n * 512, 1 << 16)));
    let report = survives(&overlapping).0;
    assert_eq!(report.map(|_| ()).map_err(|e| e.kind()), Err(ErrorKind::Limit));
}

#[test]
fn l2_tables_at_odd_places_are_read_so_many_times_only() {
    let new = NewImage { size: ByteLen::new(1 << 50), ..NewImage::default() };
    let layout = new.layout().expect("valid");
    let mut image = Image::new(1 << 30);
    for (at, bytes) in &layout.writes {
        image.write(at.get(), bytes);
    }
    let noise: Vec<u8> =
        (0..4u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    image.write(512 << 20, &noise);
    let tables = (0..1 << 13).map(|i| COPIED | ((512 << 20) + i * 512));
    write_words(&mut image, layout.header.l1_offset.get(), tables);
    let (report, read) = survives(&image);
    assert!(report.is_ok() && read < 200 << 20, "{read} bytes: {report:?}");
}

#[test]
fn random_bytes_in_every_table_never_panic() {
    let mut rng = Rng::new(3);
    for round in 0..150 {
        let bits = 9 + rng.below(4);
        let new = NewImage {
            size: ByteLen::new(4 << 20),
            cluster_size: 1 << bits,
            refcount_bits: 1 << rng.below(7),
            ..NewImage::default()
        };
        let layout = new.layout().expect("valid");
        let mut image = Image::new(1 << 20);
        for (at, bytes) in &layout.writes {
            image.write(at.get(), bytes);
        }
        let mut header = layout.header;
        if rng.chance(30) {
            header.nb_snapshots = rng.below(5) as u32;
            header.snapshots_offset = HostOffset::new(rng.below(20) << bits);
        }
        header.incompatible |= rng.below(32) & !8;
        if header.encode().is_ok_and(|h| Header::parse(&[&h[..], &[0; 4096]].concat()).is_ok()) {
            image.write(0, &header.encode().expect("was ok"));
        }
        for _ in 0..rng.below(3000) {
            let at = 512 + rng.below((1 << 20) - 1024);
            let value = match rng.below(4) {
                0 => rng.next_u64(),
                1 => COPIED | rng.below(1 << 11) << 9,
                2 => 1 << 62 | rng.below(1 << 20),
                _ => rng.below(1 << 21) & !511,
            };
            image.write(at & !7, &value.to_be_bytes());
        }
        let storage = SimStorage::from_image(image, SimOptions::default());
        for what in [Repair::Leaks, Repair::All] {
            let before = block_on(check(&storage, CheckOptions::default()));
            let after = block_on(repair(&storage, what, CheckOptions::default()));
            if let (Ok(before), Ok(after)) = (before, after) {
                assert!(
                    after.corruptions <= before.corruptions,
                    "round {round} {what:?}: {before:#?} {after:#?}"
                );
            }
        }
    }
}

/// The space between two clusters was gone through one by one, and more of it than any refcounts reach.
#[test]
fn refcounts_of_clusters_that_are_too_far_apart_are_not_made_anew() {
    let a = fresh(1 << 30, 512);
    let (table, _, l1, _) = places(&a);
    let mut a = put(&a, table, 0);
    let l2 = a.len();
    a.resize(l2 + 512, 0);
    let mut a = put(&a, l1, 1 << 63 | l2 as u64);
    for index in 0..64 {
        a = put(&a, l2 + 8 * index, 1 << 63 | (index as u64 + 1) << 37);
    }
    let mut image = Image::from_bytes(&a);
    image.set_len(15 << 40);
    let storage = SimStorage::from_image(image, SimOptions::default());
    let e = block_on(repair(&storage, Repair::All, CheckOptions::default())).expect_err("refused");
    assert_eq!(e.kind(), bedplate_types::ErrorKind::Limit, "{e}");
}
