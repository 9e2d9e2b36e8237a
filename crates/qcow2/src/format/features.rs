//! Feature bits: their meaning, their names, and which of them this engine can work with.
//!
//! Callers: opening (which images are refused, and with which sentence), `info` (names), the layout of new
//! images (the feature name table).

use super::Header;
use super::bytes::printable;
use bedplate_types::{Error, ErrorKind, Result};

/// Incompatible features: an image with an unknown one must not be opened.
pub mod incompat {
    /// Reference counts may be stale: the image was not closed after writing with lazy refcounts.
    pub const DIRTY: u64 = 1 << 0;
    /// Metadata was found to be wrong; writing is forbidden until the image is repaired.
    pub const CORRUPT: u64 = 1 << 1;
    /// Guest data lies in a second file.
    pub const EXTERNAL_DATA: u64 = 1 << 2;
    /// The compression type field is not zlib.
    pub const COMPRESSION: u64 = 1 << 3;
    /// L2 entries are 16 bytes long and describe subclusters.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// All bits that the specification names.
    pub const KNOWN: u64 = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION | EXTENDED_L2;
    /// The bits that this engine works with (a corrupt image only for reading).
    pub const SUPPORTED: u64 = DIRTY | CORRUPT | COMPRESSION | EXTENDED_L2;
}

/// Compatible features: unknown ones can be ignored.
pub mod compat {
    /// Reference counts may be written late, under the dirty bit.
    pub const LAZY_REFCOUNTS: u64 = 1 << 0;
}

/// Autoclear features: a writer that does not know one must clear it.
pub mod autoclear {
    /// The bitmaps extension is consistent with the image.
    pub const BITMAPS: u64 = 1 << 0;
    /// The external data file can be read as a raw image.
    pub const RAW_EXTERNAL_DATA: u64 = 1 << 1;
    /// Bedplate's own use of bits that no feature has: a random number while a server keeps changes outside of the
    /// file. Like all unknown autoclear bits they are cleared by whoever else opens the image for writing, which tells
    /// the next server that the image is not as the last one left it.
    pub const SESSION: u64 = !0 << 8;
}

/// Which of the three sets a feature bit belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureSet {
    /// Must be known to open the image.
    Incompatible,
    /// May be ignored.
    Compatible,
    /// Must be cleared by writers that do not know it.
    Autoclear,
    /// A set that this version does not know.
    Other(u8),
}

impl FeatureSet {
    const fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Incompatible,
            1 => Self::Compatible,
            2 => Self::Autoclear,
            other => Self::Other(other),
        }
    }

    const fn to_byte(self) -> u8 {
        match self {
            Self::Incompatible => 0,
            Self::Compatible => 1,
            Self::Autoclear => 2,
            Self::Other(byte) => byte,
        }
    }
}

/// One row of the feature name table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureName {
    /// The set the bit belongs to.
    pub set: FeatureSet,
    /// The bit's number.
    pub bit: u8,
    /// The name, as printable text.
    pub name: String,
}

const NAME_ROW: usize = 48;
const NAME_BYTES: usize = 46;

/// The names that images made by this engine carry.
const OWN_NAMES: &[(FeatureSet, u8, &str)] = &[
    (FeatureSet::Incompatible, 0, "dirty bit"),
    (FeatureSet::Incompatible, 1, "corrupt bit"),
    (FeatureSet::Incompatible, 2, "external data file"),
    (FeatureSet::Incompatible, 3, "compression type"),
    (FeatureSet::Incompatible, 4, "extended L2 entries"),
    (FeatureSet::Compatible, 0, "lazy refcounts"),
    (FeatureSet::Autoclear, 0, "bitmaps"),
    (FeatureSet::Autoclear, 1, "raw external data"),
];

/// Reads a feature name table. Rows are taken as they are; an incomplete last row is ignored.
pub fn parse_feature_names(data: &[u8]) -> Vec<FeatureName> {
    data.chunks_exact(NAME_ROW)
        .filter_map(|row| {
            let (&[set, bit], name) = row.split_first_chunk()?;
            let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
            let name = printable(name.get(..end)?);
            Some(FeatureName { set: FeatureSet::from_byte(set), bit, name })
        })
        .collect()
}

/// The feature name table of a new image.
pub fn encode_feature_names() -> Vec<u8> {
    let mut out = Vec::with_capacity(OWN_NAMES.len() * NAME_ROW);
    for (set, bit, name) in OWN_NAMES {
        out.extend_from_slice(&[set.to_byte(), *bit]);
        let mut field = [0u8; NAME_BYTES];
        for (to, from) in field.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        out.extend_from_slice(&field);
    }
    out
}

/// The names of the incompatible bits in `bits`, by the image's own table, else by the specification.
pub fn incompatible_names(header: &Header, bits: u64) -> Vec<String> {
    let table =
        header.extension(super::EXT_FEATURE_NAMES).map(parse_feature_names).unwrap_or_default();
    (0..64u8)
        .filter(|bit| bits >> bit & 1 != 0)
        .map(|bit| {
            let listed = table
                .iter()
                .find(|n| n.set == FeatureSet::Incompatible && n.bit == bit && !n.name.is_empty())
                .map(|n| n.name.as_str());
            let own = OWN_NAMES
                .iter()
                .find(|(set, b, _)| *set == FeatureSet::Incompatible && *b == bit)
                .map(|(_, _, name)| *name);
            match listed.or(own) {
                Some(name) => format!("'{name}' (bit {bit})"),
                None => format!("incompatible feature bit {bit}"),
            }
        })
        .collect()
}

/// Checks that this engine can work with the image; `writable` says whether it is to be written.
///
/// # Errors
/// `Unsupported` with a sentence for each feature that is missing here, `Corrupt` when an image that is
/// marked corrupt is to be written.
pub fn check_supported(header: &Header, writable: bool) -> Result<()> {
    let unsupported = |text: String| Err(Error::new(ErrorKind::Unsupported, text));
    let bits = header.incompatible;
    let unknown = bits & !incompat::KNOWN;
    if unknown != 0 {
        return unsupported(format!(
            "the image needs features that this version does not know: {}; use a newer version",
            incompatible_names(header, unknown).join(", ")
        ));
    }
    if bits & incompat::EXTERNAL_DATA != 0 {
        if header.crypt_method != 0 {
            return unsupported(
                "the image is encrypted and has an external data file, which is not supported together; convert it with \
                 'qemu-img convert' first"
                    .into(),
            );
        }
        if header.nb_snapshots > 0 {
            return unsupported(
                "the image has an external data file and internal snapshots, which can't be together".into(),
            );
        }
        if header.autoclear & autoclear::RAW_EXTERNAL_DATA != 0 && header.backing_file.is_some() {
            return unsupported(
                "the image has a backing file, and an external data file that is to read as the disk \
                 (data_file_raw), which can't be together"
                    .into(),
            );
        }
    }
    match header.crypt_method {
        // 2: LUKS; which ciphers of it, the encryption's own header tells.
        0 | 2 => {}
        1 => {
            return unsupported(
                "the image is encrypted with qcow2's old AES method, which is not supported; \
                 convert it to an unencrypted image with 'qemu-img convert' first"
                    .into(),
            );
        }
        other => {
            return unsupported(format!("the image has the unknown encryption method {other}"));
        }
    }
    if writable && bits & incompat::CORRUPT != 0 {
        return Err(Error::new(
            ErrorKind::Corrupt,
            "the image is marked corrupt and can only be opened read-only; \
             repair it with 'bedplate check -r all'",
        ));
    }
    Ok(())
}

/// Checks that an image can be checked and repaired, for which its guest data need not be understood.
///
/// # Errors
/// `Unsupported` when it has features that are not known.
pub fn check_checkable(header: &Header) -> Result<()> {
    let unknown = header.incompatible & !incompat::KNOWN;
    if unknown == 0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "the image needs features that this version does not know: {}; use a newer version",
            incompatible_names(header, unknown).join(", ")
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(incompatible: u64, crypt_method: u32) -> Header {
        Header { incompatible, crypt_method, ..Header::default() }
    }

    #[test]
    fn each_missing_feature_is_refused_with_its_own_sentence() {
        let text = |h: &Header, w| match check_supported(h, w) {
            Ok(()) => "ok".to_string(),
            Err(e) => format!("{e}"),
        };
        assert_eq!(
            text(&header(incompat::DIRTY | incompat::COMPRESSION | incompat::EXTENDED_L2, 0), true),
            "ok"
        );
        assert_eq!(text(&header(incompat::CORRUPT, 0), false), "ok");
        assert!(text(&header(incompat::CORRUPT, 0), true).contains("marked corrupt"));
        assert_eq!(text(&header(incompat::EXTERNAL_DATA, 0), true), "ok");
        let with_snapshot = Header { nb_snapshots: 1, ..header(incompat::EXTERNAL_DATA, 0) };
        assert!(text(&with_snapshot, false).contains("internal snapshots"));
        assert!(text(&header(0, 1), false).contains("AES"));
        assert_eq!(text(&header(0, 2), true), "ok");
        assert!(text(&header(0, 3), false).contains("unknown encryption method 3"));
    }

    #[test]
    fn unknown_bits_are_named_by_the_image_itself() {
        let mut h = header(1 << 40 | 1 << 41, 0);
        let mut row = vec![0, 40];
        row.extend_from_slice(b"time\ntravel");
        row.resize(NAME_ROW, 0);
        h.extensions
            .push(super::super::Extension { id: super::super::EXT_FEATURE_NAMES, data: row });
        let text = check_supported(&h, false).map_err(|e| e.to_string()).expect_err("unknown");
        assert!(text.contains(r"'time\ntravel' (bit 40), incompatible feature bit 41"), "{text}");
    }

    #[test]
    fn the_table_of_new_images_reads_back() {
        let names = parse_feature_names(&encode_feature_names());
        let back: Vec<_> = names.iter().map(|n| (n.set, n.bit, n.name.as_str())).collect();
        assert_eq!(back, OWN_NAMES);
    }

    proptest! {
        #[test]
        fn random_name_tables_never_panic(data: Vec<u8>, bits: u64) {
            let mut h = header(bits, 0);
            prop_assert_eq!(parse_feature_names(&data).len(), data.len() / NAME_ROW);
            h.extensions.push(super::super::Extension { id: super::super::EXT_FEATURE_NAMES, data });
            prop_assert_eq!(incompatible_names(&h, bits).len() as u32, bits.count_ones());
        }
    }
}
