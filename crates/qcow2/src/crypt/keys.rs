//! From a passphrase to the master key: PBKDF2, the anti-forensic splitter, and the key slots of LUKS1.
//!
//! Callers: [`super::unlock`] and [`super::new_luks_area`]. Secrets lie in memory that is overwritten when it is given back.
//! Written from the "LUKS On-Disk Format Specification Version 1.2.3", sections 2.4 and 4.

use super::xts::Xts;
use crate::format::{
    LUKS_DIGEST_BYTES, LUKS_SALT_BYTES, LuksHash, LuksHeader, LuksSlot, LuksSuite,
};
use bedplate_types::{Error, ErrorKind, Result};
use pbkdf2::pbkdf2_hmac;
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Bytes that nobody else may see.
pub(crate) type Secret = Zeroizing<Vec<u8>>;

/// Rounds below which no passphrase of a new image goes (as QEMU).
const LEAST_ITERATIONS: u32 = 1000;
/// How long the rounds of this host are counted.
const MEASURED: Duration = Duration::from_millis(20);

impl LuksHash {
    fn derive(self, secret: &[u8], salt: &[u8], rounds: u32, out: &mut [u8]) {
        match self {
            Self::Sha1 => pbkdf2_hmac::<Sha1>(secret, salt, rounds, out),
            Self::Sha256 => pbkdf2_hmac::<Sha256>(secret, salt, rounds, out),
            Self::Sha512 => pbkdf2_hmac::<Sha512>(secret, salt, rounds, out),
        }
    }

    /// Overwrites `out`, at most a digest long, with the hash of its number and what it holds.
    fn diffuse_block(self, number: u32, out: &mut [u8]) {
        fn hash<D: Digest>(number: u32, out: &mut [u8]) {
            let digest = D::new().chain_update(number.to_be_bytes()).chain_update(&*out).finalize();
            for (to, from) in out.iter_mut().zip(digest) {
                *to = from;
            }
        }
        match self {
            Self::Sha1 => hash::<Sha1>(number, out),
            Self::Sha256 => hash::<Sha256>(number, out),
            Self::Sha512 => hash::<Sha512>(number, out),
        }
    }

    fn diffuse(self, bytes: &mut [u8]) {
        for (block, number) in bytes.chunks_mut(self.digest_bytes()).zip(0..) {
            self.diffuse_block(number, block);
        }
    }
}

fn xor(to: &mut [u8], from: &[u8]) {
    for (a, b) in to.iter_mut().zip(from) {
        *a ^= b;
    }
}

fn random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes)
        .map_err(|e| Error::new(ErrorKind::Io, format!("the system gives no random numbers: {e}")))
}

/// The key that stripes hold together.
pub(super) fn merge(hash: LuksHash, stripes: &[u8], key_bytes: usize) -> Secret {
    let mut key = Secret::new(vec![0; key_bytes]);
    let mut left = stripes.chunks_exact(key_bytes.max(1)).peekable();
    while let Some(stripe) = left.next() {
        xor(&mut key, stripe);
        if left.peek().is_some() {
            hash.diffuse(&mut key);
        }
    }
    key
}

/// Stripes that hold a key together, of which each single bit is needed.
pub(super) fn split(hash: LuksHash, key: &[u8], stripes: u32) -> Result<Secret> {
    let mut all = Secret::new(vec![0; key.len() * stripes as usize]);
    let last = all.len().saturating_sub(key.len());
    let (first, end) = all.split_at_mut(last);
    random(first)?;
    let mut mixed = Secret::new(vec![0; key.len()]);
    for stripe in first.chunks_exact(key.len().max(1)) {
        xor(&mut mixed, stripe);
        hash.diffuse(&mut mixed);
    }
    xor(end, &mixed);
    xor(end, key);
    Ok(all)
}

/// The digest that tells whether a master key is the right one.
fn digest(header: &LuksHeader, hash: LuksHash, key: &[u8]) -> [u8; LUKS_DIGEST_BYTES] {
    let mut out = [0; LUKS_DIGEST_BYTES];
    hash.derive(key, &header.digest_salt, header.digest_iterations, &mut out);
    out
}

/// The cipher that a slot's key material is under.
fn slot_cipher(suite: LuksSuite, slot: &LuksSlot, passphrase: &[u8]) -> Result<Xts> {
    let mut key = Secret::new(vec![0; suite.cipher.key_bytes()]);
    suite.hash.derive(passphrase, &slot.salt, slot.iterations, &mut key);
    Xts::new(&key, suite.iv)
}

/// The master key, if the passphrase is that of the slot whose key material this is.
pub(super) fn open_slot(
    header: &LuksHeader,
    suite: LuksSuite,
    slot: &LuksSlot,
    material: &[u8],
    passphrase: &[u8],
) -> Result<Option<Secret>> {
    let key_bytes = suite.cipher.key_bytes();
    let mut stripes = Secret::new(material.to_vec());
    slot_cipher(suite, slot, passphrase)?.decrypt(0, &mut stripes);
    let used = key_bytes * slot.stripes as usize;
    let key = merge(suite.hash, stripes.get(..used).unwrap_or_default(), key_bytes);
    Ok((digest(header, suite.hash, &key) == header.digest).then_some(key))
}

/// Rounds of derivation that take this long here, for a key of this many bytes.
fn rounds_for(hash: LuksHash, key_bytes: usize, time: Duration) -> u32 {
    let mut key = Secret::new(vec![0; key_bytes]);
    let mut rounds = LEAST_ITERATIONS;
    loop {
        let start = Instant::now();
        hash.derive(b"measure", &[0; LUKS_SALT_BYTES], rounds, &mut key);
        let took = start.elapsed();
        if took >= MEASURED || rounds >= 1 << 24 {
            let wanted =
                time.as_nanos().saturating_mul(u128::from(rounds)) / took.as_nanos().max(1);
            return u32::try_from(wanted).unwrap_or(u32::MAX).clamp(LEAST_ITERATIONS, 1 << 24);
        }
        rounds *= 2;
    }
}

/// A header with a new master key in its first slot, under `passphrase`, and that slot's key material.
pub(super) fn new_header(
    suite: LuksSuite,
    time: Duration,
    passphrase: &[u8],
) -> Result<(LuksHeader, Vec<u8>)> {
    let mut header = LuksHeader::empty(suite);
    let key_bytes = suite.cipher.key_bytes();
    let mut key = Secret::new(vec![0; key_bytes]);
    random(&mut key)?;
    random(&mut header.digest_salt)?;
    header.uuid = new_uuid()?;
    // The digest is tried for every key that is, so it takes an eighth of the time (as QEMU).
    header.digest_iterations = rounds_for(suite.hash, LUKS_DIGEST_BYTES, time / 8);
    header.digest = digest(&header, suite.hash, &key);
    let Some(slot) = header.slots.first_mut() else { return Ok((header, Vec::new())) };
    slot.active = true;
    slot.iterations = rounds_for(suite.hash, key_bytes, time);
    random(&mut slot.salt)?;
    let stripes = split(suite.hash, &key, slot.stripes)?;
    let mut material = stripes.to_vec();
    slot_cipher(suite, slot, passphrase)?.encrypt(0, &mut material);
    Ok((header, material))
}

/// A random UUID (RFC 9562, version 4) as text.
fn new_uuid() -> Result<String> {
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    let number = u128::from_be_bytes(bytes) & !(0xf << 76 | 0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let text = format!("{number:032x}");
    let part = |from: usize, to: usize| text.get(from..to).unwrap_or_default();
    Ok(format!("{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::LUKS_STRIPES;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// RFC 6070 for SHA-1, RFC 7914 (section 11) for SHA-256.
    #[test]
    fn keys_are_derived_as_the_standards_say() {
        let derive = |hash: LuksHash, secret: &[u8], salt: &[u8], rounds, len| {
            let mut out = vec![0; len];
            hash.derive(secret, salt, rounds, &mut out);
            hex(&out)
        };
        assert_eq!(
            derive(LuksHash::Sha1, b"password", b"salt", 4096, 20),
            "4b007901b765489abead49d926f721d065a429c1"
        );
        assert_eq!(
            derive(LuksHash::Sha256, b"passwd", b"salt", 1, 64),
            "55ac046e56e3089fec1691c22544b605f94185216dde0465e68b9d57c20dacbc\
             49ca9cccf179b645991664b39d77ef317c71b845b1e30bd509112041d3a19783"
        );
        assert_eq!(
            derive(LuksHash::Sha512, b"password", b"salt", 1, 64),
            "867f70cf1ade02cff3752599a3a53dc4af34c7a669815ae5d513554e1c8cf252\
             c02d470a285a0501bad999bfe943c08f050235d7d68b1da55e63f73b60a57fce"
        );
    }

    #[test]
    fn stripes_give_the_key_again_and_only_all_of_them_do() {
        for hash in [LuksHash::Sha1, LuksHash::Sha256, LuksHash::Sha512] {
            for len in [32, 64] {
                let key: Vec<u8> = (1..=len).collect();
                let mut stripes = split(hash, &key, 100).expect("stripes");
                assert_eq!(*merge(hash, &stripes, key.len()), key);
                stripes[40] ^= 1;
                assert_ne!(*merge(hash, &stripes, key.len()), key);
            }
        }
    }

    /// Two stripes: the first is zero, so the key is the second stripe under the hash of nothing but zeroes.
    #[test]
    fn the_splitter_hashes_each_block_with_its_number() {
        let zeroes = |number: u32| {
            let mut text = number.to_be_bytes().to_vec();
            text.resize(4 + 32, 0);
            Sha256::digest(&text).to_vec()
        };
        let expected = [zeroes(0), zeroes(1)].concat();
        assert_eq!(*merge(LuksHash::Sha256, &[0; 128], 64), expected);
        // The last block of SHA-1 over 32 bytes is cut short on both sides.
        let tail = Sha1::digest([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).to_vec();
        assert_eq!(merge(LuksHash::Sha1, &[0; 64], 32)[20..], tail[..12]);
    }

    #[test]
    fn a_new_header_opens_with_its_passphrase_and_no_other() {
        let suite = LuksSuite::default();
        let (header, material) =
            new_header(suite, Duration::from_millis(1), b"open sesame").expect("a header");
        let slot = &header.slots[0];
        let open = |passphrase: &[u8]| {
            open_slot(&header, suite, slot, &material, passphrase).expect("it can be tried")
        };
        assert_eq!(material.len(), 64 * LUKS_STRIPES as usize);
        assert_eq!(open(b"open sesame").expect("the key").len(), 64);
        assert!(open(b"open sesame\n").is_none());
        assert!(open(b"").is_none());
        let uuid = header.uuid.as_bytes();
        assert_eq!((uuid.len(), uuid[14], uuid[23]), (36, b'4', b'-'));
    }
}
