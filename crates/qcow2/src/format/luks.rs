//! The LUKS1 header that an encrypted qcow2 image holds, and the header extension that says where.
//!
//! Callers: opening (unlocking), `create`, `info`. Pure: no key is seen here. A header that [`LuksHeader::parse`] gave
//! can be described whatever it asks for; [`LuksHeader::suite`] tells whether this engine can use it.
//! Written from the "LUKS On-Disk Format Specification Version 1.2.3" and the qcow2 specification ("Full disk encryption
//! header pointer").

use super::bytes::{be16, be32, be64, printable};
use super::{EXT_ENCRYPTION, Geometry, Header};
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result, limits};

/// Bytes of the header without the key material.
pub const LUKS_HEADER_BYTES: usize = 592;
/// Stripes that a key is split into; the only number in use.
pub const LUKS_STRIPES: u32 = 4000;
/// Key slots of a header.
pub const LUKS_SLOTS: usize = 8;
/// Bytes of the master key's digest.
pub const LUKS_DIGEST_BYTES: usize = 20;
/// Bytes of every salt.
pub const LUKS_SALT_BYTES: usize = 32;

const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const ACTIVE: u32 = 0x00ac_71f3;
const INACTIVE: u32 = 0x0000_dead;
/// Places in the header are counted in sectors of this many bytes.
const SECTOR: u64 = 512;
/// Key material is aligned to this.
const MATERIAL_ALIGN: u64 = 4096;
/// Bytes of a name: cipher, mode, hash.
const NAME_BYTES: usize = 32;
const UUID_BYTES: usize = 40;
const SLOT_BYTES: usize = 48;
const SLOTS_AT: usize = 208;

/// The cipher, always in XTS mode: two keys of the cipher's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LuksCipher {
    /// AES with keys of 128 bits.
    Aes128,
    /// AES with keys of 256 bits.
    #[default]
    Aes256,
}

impl LuksCipher {
    /// Bytes of the master key.
    pub const fn key_bytes(self) -> usize {
        match self {
            Self::Aes128 => 32,
            Self::Aes256 => 64,
        }
    }

    /// The name that qemu-img uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aes128 => "aes-128",
            Self::Aes256 => "aes-256",
        }
    }
}

/// How a sector's number becomes its initial value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LuksIv {
    /// The number's low 32 bits, little-endian.
    Plain,
    /// The number, little-endian.
    #[default]
    Plain64,
}

impl LuksIv {
    /// The name that qemu-img uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Plain64 => "plain64",
        }
    }
}

/// The hash of key derivation and of the anti-forensic splitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LuksHash {
    /// SHA-1.
    Sha1,
    /// SHA-256.
    #[default]
    Sha256,
    /// SHA-512.
    Sha512,
}

impl LuksHash {
    /// The name that LUKS and qemu-img use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    /// Bytes of a digest.
    pub const fn digest_bytes(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }
}

/// What an image is encrypted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LuksSuite {
    /// The cipher.
    pub cipher: LuksCipher,
    /// Initial values.
    pub iv: LuksIv,
    /// The hash.
    pub hash: LuksHash,
}

/// One of the places that can hold the master key under a passphrase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LuksSlot {
    /// It holds the key.
    pub active: bool,
    /// Rounds of PBKDF2.
    pub iterations: u32,
    /// The salt.
    pub salt: [u8; LUKS_SALT_BYTES],
    /// Where its key material begins, in bytes from the header's begin.
    pub offset: u64,
    /// Stripes of the key material.
    pub stripes: u32,
}

/// A LUKS1 header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LuksHeader {
    /// The cipher's name as it is stored.
    pub cipher: String,
    /// Its mode with the way of initial values, as stored: "xts-plain64".
    pub mode: String,
    /// The hash's name as it is stored.
    pub hash: String,
    /// Where data would begin in a file of LUKS' own, in bytes. Means nothing inside of qcow2.
    pub payload_offset: u64,
    /// Bytes of the master key.
    pub key_bytes: u32,
    /// Tells whether a master key is the right one.
    pub digest: [u8; LUKS_DIGEST_BYTES],
    /// The salt of that.
    pub digest_salt: [u8; LUKS_SALT_BYTES],
    /// Rounds of PBKDF2 for that.
    pub digest_iterations: u32,
    /// The volume's UUID as text.
    pub uuid: String,
    /// The key slots.
    pub slots: [LuksSlot; LUKS_SLOTS],
}

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::BadImage, text)
}

fn unsupported(text: String) -> Error {
    Error::new(ErrorKind::Unsupported, text)
}

fn name(field: &[u8]) -> String {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    printable(field.get(..end).unwrap_or_default())
}

/// Where the LUKS header of an image lies: its clusters, and their bytes with all key material.
///
/// # Errors
/// `BadImage` when the extension is missing or wrong.
pub fn luks_place(header: &Header, geometry: Geometry) -> Result<(HostOffset, ByteLen)> {
    let Some(data) = header.extension(EXT_ENCRYPTION) else {
        return Err(bad(
            "the image says that it is encrypted with LUKS, but not where the header of the encryption is",
        ));
    };
    let (Some(at), Some(len), 16) = (be64(data, 0), be64(data, 8), data.len()) else {
        return Err(bad(format!(
            "the encryption header extension has {} bytes instead of 16",
            data.len()
        )));
    };
    let fits = at.checked_add(len).is_some_and(|end| end <= super::MAX_HOST);
    if at == 0 || !at.is_multiple_of(geometry.cluster_size()) || !fits {
        return Err(bad(format!("the header of the encryption can't lie at offset {at:#x}")));
    }
    if len < LUKS_HEADER_BYTES as u64 || len > limits::MAX_LUKS_BYTES {
        return Err(bad(format!(
            "the header of the encryption has {len} bytes; {LUKS_HEADER_BYTES} to {} are allowed",
            limits::MAX_LUKS_BYTES
        )));
    }
    Ok((HostOffset::new(at), ByteLen::new(len)))
}

impl LuksSlot {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let active = match be32(bytes, 0)? {
            ACTIVE => true,
            INACTIVE => false,
            _ => return None,
        };
        Some(Self {
            active,
            iterations: be32(bytes, 4)?,
            salt: *bytes.get(8..)?.first_chunk()?,
            offset: u64::from(be32(bytes, 40)?) * SECTOR,
            stripes: be32(bytes, 44)?,
        })
    }
}

impl LuksHeader {
    /// Reads a header from its first [`LUKS_HEADER_BYTES`] bytes.
    ///
    /// # Errors
    /// `BadImage` when it is none, `Unsupported` for another version than 1.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() < LUKS_HEADER_BYTES || !bytes.starts_with(&MAGIC) {
            return Err(bad("the header of the encryption is not one of LUKS"));
        }
        match be16(bytes, 6) {
            Some(1) => {}
            other => {
                return Err(unsupported(format!(
                    "the image is encrypted with version {} of LUKS; in qcow2 there is only version 1",
                    other.unwrap_or_default()
                )));
            }
        }
        Self::parse_fields(bytes).ok_or_else(|| {
            bad("a key slot in the header of the encryption is neither in use nor free")
        })
    }

    fn parse_fields(bytes: &[u8]) -> Option<Self> {
        let text = |at: usize, len: usize| bytes.get(at..at + len).map(name);
        let mut slots = [LuksSlot::default(); LUKS_SLOTS];
        for (slot, raw) in slots.iter_mut().zip(bytes.get(SLOTS_AT..)?.chunks_exact(SLOT_BYTES)) {
            *slot = LuksSlot::parse(raw)?;
        }
        Some(Self {
            cipher: text(8, NAME_BYTES)?,
            mode: text(40, NAME_BYTES)?,
            hash: text(72, NAME_BYTES)?,
            payload_offset: u64::from(be32(bytes, 104)?) * SECTOR,
            key_bytes: be32(bytes, 108)?,
            digest: *bytes.get(112..)?.first_chunk()?,
            digest_salt: *bytes.get(132..)?.first_chunk()?,
            digest_iterations: be32(bytes, 164)?,
            uuid: text(168, UUID_BYTES)?,
            slots,
        })
    }

    /// The header's bytes; names are cut off where they are too long, places count in whole sectors.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(LUKS_HEADER_BYTES);
        let text = |out: &mut Vec<u8>, text: &str, len: usize| {
            let end = out.len() + len;
            out.extend(text.bytes().take(len - 1));
            out.resize(end, 0);
        };
        let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&1_u16.to_be_bytes());
        text(&mut out, &self.cipher, NAME_BYTES);
        text(&mut out, &self.mode, NAME_BYTES);
        text(&mut out, &self.hash, NAME_BYTES);
        out.extend_from_slice(&sectors(self.payload_offset).to_be_bytes());
        out.extend_from_slice(&self.key_bytes.to_be_bytes());
        out.extend_from_slice(&self.digest);
        out.extend_from_slice(&self.digest_salt);
        out.extend_from_slice(&self.digest_iterations.to_be_bytes());
        text(&mut out, &self.uuid, UUID_BYTES);
        for slot in &self.slots {
            let state = if slot.active { ACTIVE } else { INACTIVE };
            out.extend_from_slice(&state.to_be_bytes());
            out.extend_from_slice(&slot.iterations.to_be_bytes());
            out.extend_from_slice(&slot.salt);
            out.extend_from_slice(&sectors(slot.offset).to_be_bytes());
            out.extend_from_slice(&slot.stripes.to_be_bytes());
        }
        out
    }

    /// The chaining mode and the way of initial values: "xts" and "plain64".
    pub fn mode_parts(&self) -> (&str, &str) {
        self.mode.split_once('-').unwrap_or((&self.mode, ""))
    }

    /// What the image is encrypted with.
    ///
    /// # Errors
    /// `Unsupported` with a sentence for what this engine does not have, `BadImage` for a key of another size than the
    /// cipher's.
    pub fn suite(&self) -> Result<LuksSuite> {
        let (mode, iv) = self.mode_parts();
        let iv = match iv {
            "plain" => Some(LuksIv::Plain),
            "plain64" => Some(LuksIv::Plain64),
            _ => None,
        };
        let (Some(iv), "aes", "xts") = (iv, self.cipher.as_str(), mode) else {
            return Err(unsupported(format!(
                "the image is encrypted with the cipher {}-{}, which is not supported; supported are aes-xts-plain64 \
                 and aes-xts-plain",
                self.cipher, self.mode
            )));
        };
        let hash = match self.hash.as_str() {
            "sha1" => LuksHash::Sha1,
            "sha256" => LuksHash::Sha256,
            "sha512" => LuksHash::Sha512,
            other => {
                return Err(unsupported(format!(
                    "the keys of the image are derived with the hash {other}, which is not supported; supported are \
                     sha1, sha256 and sha512"
                )));
            }
        };
        let cipher = match self.key_bytes {
            32 => LuksCipher::Aes128,
            64 => LuksCipher::Aes256,
            48 => {
                return Err(unsupported(
                    "the image is encrypted with aes-192, which is not supported".into(),
                ));
            }
            other => {
                return Err(bad(format!("the key of the encryption can't have {other} bytes")));
            }
        };
        Ok(LuksSuite { cipher, iv, hash })
    }

    /// The bytes of a slot's key material, which lies in the `room` bytes of the header.
    ///
    /// # Errors
    /// `BadImage` when the slot breaks the format's rules.
    pub fn material(&self, slot: &LuksSlot, room: ByteLen) -> Result<ByteLen> {
        if slot.stripes != LUKS_STRIPES {
            return Err(bad(format!(
                "a key slot of the encryption has {} stripes instead of {LUKS_STRIPES}",
                slot.stripes
            )));
        }
        let len = (u64::from(self.key_bytes) * u64::from(slot.stripes)).next_multiple_of(SECTOR);
        let end = slot.offset.checked_add(len);
        if slot.offset < LUKS_HEADER_BYTES as u64 || end.is_none_or(|end| end > room.get()) {
            return Err(bad(format!(
                "the key material at {:#x} lies outside of the encryption's header",
                slot.offset
            )));
        }
        Ok(ByteLen::new(len))
    }

    /// Refuses a header for which it would take too long to try a passphrase.
    ///
    /// # Errors
    /// `BadImage` without any round, `Limit` for too many of them.
    pub fn check_iterations(&self, suite: LuksSuite) -> Result<()> {
        let active = || self.slots.iter().filter(|slot| slot.active);
        if self.digest_iterations == 0 || active().any(|slot| slot.iterations == 0) {
            return Err(bad("the keys of the encryption are derived in no rounds at all"));
        }
        // Each block of a key takes all rounds; and each slot's key is tried against the digest, one block.
        let blocks = suite.cipher.key_bytes().div_ceil(suite.hash.digest_bytes()) as u64;
        let rounds = |slot: &LuksSlot| {
            blocks * u64::from(slot.iterations) + u64::from(self.digest_iterations)
        };
        let all: u64 = active().map(rounds).sum();
        if all > limits::MAX_LUKS_ITERATIONS {
            return Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "the image asks for {all} rounds of key derivation, which would take very long; the most is {}; \
                     a key with fewer (iter-time) can be set with 'qemu-img amend'",
                    limits::MAX_LUKS_ITERATIONS
                ),
            ));
        }
        Ok(())
    }

    /// A header without keys: all slots free, each with its place.
    pub fn empty(suite: LuksSuite) -> Self {
        let key_bytes = suite.cipher.key_bytes() as u64;
        let step = (key_bytes * u64::from(LUKS_STRIPES)).next_multiple_of(MATERIAL_ALIGN);
        let mut slots = [LuksSlot::default(); LUKS_SLOTS];
        let mut at = MATERIAL_ALIGN;
        for slot in &mut slots {
            *slot = LuksSlot { offset: at, stripes: LUKS_STRIPES, ..LuksSlot::default() };
            at += step;
        }
        Self {
            cipher: "aes".into(),
            mode: format!("xts-{}", suite.iv.name()),
            hash: suite.hash.name().into(),
            payload_offset: at,
            key_bytes: key_bytes as u32,
            digest: [0; LUKS_DIGEST_BYTES],
            digest_salt: [0; LUKS_SALT_BYTES],
            digest_iterations: 0,
            uuid: String::new(),
            slots,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Extension;
    use proptest::prelude::*;

    fn header() -> LuksHeader {
        let mut header = LuksHeader::empty(LuksSuite::default());
        header.uuid = "7008226b-2e71-4527-b033-d2061a37a7db".into();
        header.digest_iterations = 1000;
        header.slots[0].active = true;
        header.slots[0].iterations = 2000;
        header
    }

    #[test]
    fn a_header_reads_back_and_has_the_places_of_qemus() {
        let header = header();
        assert_eq!(LuksHeader::parse(&header.encode()).expect("valid"), header);
        assert_eq!(header.encode().len(), LUKS_HEADER_BYTES);
        assert_eq!(header.slots.map(|s| s.offset)[..2], [4096, 262_144]);
        assert_eq!(header.payload_offset, 2_068_480);
        assert_eq!(header.suite().expect("supported"), LuksSuite::default());
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let text = |change: fn(&mut LuksHeader)| {
            let mut header = header();
            change(&mut header);
            header.suite().expect_err("not supported").to_string()
        };
        assert!(text(|h| h.cipher = "serpent".into()).contains("serpent-xts-plain64"));
        assert!(text(|h| h.mode = "cbc-essiv:sha256".into()).contains("aes-cbc-essiv:sha256"));
        assert!(text(|h| h.hash = "ripemd160".into()).contains("ripemd160"));
        assert!(text(|h| h.key_bytes = 48).contains("aes-192"));
        assert!(text(|h| h.key_bytes = u32::MAX).contains("4294967295"));
        let mut old = header().encode();
        old[7] = 2;
        assert!(LuksHeader::parse(&old).expect_err("LUKS2").to_string().contains("version 2"));
    }

    #[test]
    fn key_material_outside_of_the_header_is_refused() {
        let header = header();
        let room = ByteLen::new(header.payload_offset);
        let slot = header.slots[0];
        assert_eq!(header.material(&slot, room).expect("inside"), ByteLen::new(256_000));
        let bad = |slot: LuksSlot, room| header.material(&slot, room).is_err();
        assert!(bad(LuksSlot { stripes: 4001, ..slot }, room));
        assert!(bad(LuksSlot { stripes: u32::MAX, ..slot }, room));
        assert!(bad(LuksSlot { offset: 512, ..slot }, room));
        assert!(bad(LuksSlot { offset: u64::from(u32::MAX) * 512, ..slot }, room));
        assert!(bad(header.slots[7], ByteLen::new(header.payload_offset - 4096)));
    }

    #[test]
    fn derivations_that_take_for_ever_are_refused() {
        let mut header = header();
        assert!(header.check_iterations(LuksSuite::default()).is_ok());
        header.slots[3].iterations = u32::MAX; // free, so it takes no time
        assert!(header.check_iterations(LuksSuite::default()).is_ok());
        header.slots[3].active = true;
        assert_eq!(
            header.check_iterations(LuksSuite::default()).expect_err("too many").kind(),
            ErrorKind::Limit
        );
        header.slots[3].iterations = 0;
        assert_eq!(
            header.check_iterations(LuksSuite::default()).expect_err("none").kind(),
            ErrorKind::BadImage
        );
        header.slots[3].iterations = 1;
        header.digest_iterations = u32::MAX;
        assert_eq!(
            header.check_iterations(LuksSuite::default()).expect_err("too many").kind(),
            ErrorKind::Limit
        );
    }

    #[test]
    fn the_extension_must_name_whole_clusters_and_a_sound_length() {
        let geometry = Geometry::new(16).expect("valid");
        let place = |data: Vec<u8>| {
            let extensions = vec![Extension { id: EXT_ENCRYPTION, data }];
            luks_place(&Header { extensions, ..Header::default() }, geometry)
        };
        let words = |at: u64, len: u64| [at.to_be_bytes(), len.to_be_bytes()].concat();
        assert!(place(words(0x40000, 2_068_480)).is_ok());
        for wrong in [
            words(0, 2_068_480),
            words(0x40200, 2_068_480),
            words(u64::MAX << 16, 2_068_480),
            words(0x40000, 591),
            words(0x40000, u64::MAX),
            vec![0; 15],
            vec![],
        ] {
            assert!(place(wrong.clone()).is_err(), "{wrong:?}");
        }
        assert!(luks_place(&Header::default(), geometry).is_err());
    }

    proptest! {
        #[test]
        fn random_headers_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..700), room: u64) {
            for (to, from) in bytes.iter_mut().zip(MAGIC.into_iter().chain([0, 1])) {
                *to = from;
            }
            for slot in 0..LUKS_SLOTS {
                if let Some(state) = bytes.get_mut(SLOTS_AT + slot * SLOT_BYTES..).and_then(|b| b.first_chunk_mut()) {
                    *state = if slot % 2 == 0 { ACTIVE } else { INACTIVE }.to_be_bytes();
                }
            }
            if let Ok(header) = LuksHeader::parse(&bytes) {
                let _ = (header.suite(), header.check_iterations(LuksSuite::default()));
                for slot in &header.slots {
                    if let Ok(len) = header.material(slot, ByteLen::new(room)) {
                        prop_assert!(slot.offset + len.get() <= room);
                    }
                }
            }
        }
    }
}
