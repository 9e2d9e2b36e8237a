//! Random operations on qcow2 disks of all kinds, against a byte array.

use bedplate_model::plain::{Options, run, run_on};
use bedplate_model::{Bed, Spec, for_seeds, qemu, seeds};
use bedplate_sim::Rng;
use bedplate_tests::skip;

/// One image in this many is also shown to `qemu-img check`.
const QEMU_ONE_IN: u64 = 100;

#[test]
fn any_sequence_of_operations_reads_like_a_byte_array() {
    for_seeds("sequence", seeds(10_000, 10_000), |seed| {
        let qemu = seed % QEMU_ONE_IN == 0 && qemu::installed();
        run(seed, Options { qemu, ..Options::default() }).map(drop)
    });
    if !qemu::installed() {
        skip("any_sequence_of_operations_reads_like_a_byte_array", "in part: no qemu-img");
    }
}

#[test]
fn failing_requests_leave_old_or_new_bytes_and_nothing_else() {
    let (mut failed, mut poisoned) = (0, 0);
    for_seeds("sequence with faults", seeds(2_000, 4_000), |seed| {
        let stats = run(seed, Options { faults: true, ..Options::default() })?;
        failed += stats.failed;
        poisoned += stats.poisoned;
        Ok(())
    });
    // Else the faults never struck.
    assert!(
        failed > 0 && poisoned > 0,
        "{failed} requests failed, {poisoned} images were poisoned"
    );
}

#[test]
fn images_made_by_qemu_read_like_a_byte_array() {
    if !qemu::installed() {
        skip(
            "images_made_by_qemu_read_like_a_byte_array",
            "qemu-img and qemu-io are not installed",
        );
        return;
    }
    let beds = qemu::beds().expect("QEMU's tools make images");
    for_seeds("sequence on an image of QEMU's", seeds(160, 800), |seed| {
        let bed = beds[seed as usize % beds.len()].clone();
        let qemu = seed < 20;
        run_on(bed, Rng::new(seed), Options { qemu, ..Options::default() }).map(drop)
    });
}

#[test]
fn images_on_devices_of_a_fixed_length_read_like_a_byte_array() {
    for_seeds("sequence on a device", seeds(500, 2_000), |seed| {
        run(seed, Options { device: true, ..Options::default() }).map(drop)
    });
}

#[test]
fn encrypted_images_read_like_a_byte_array() {
    for_seeds("sequence on an encrypted image", seeds(60, 500), |seed| {
        let mut rng = Rng::new(seed);
        let bed = Bed::new(Spec::encrypted(&mut rng), &mut rng);
        // A check by qemu-img would ask for the passphrase.
        run_on(bed, rng, Options { faults: seed % 4 == 0, ..Options::default() }).map(drop)
    });
}
