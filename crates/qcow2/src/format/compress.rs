//! Compressed clusters: packing and unpacking one.
//!
//! Callers: the engine's read path, writers of compressed clusters. A cluster always expands to exactly the cluster
//! size. The input's length is rounded up to sectors, so bytes behind the stream are ignored. Memory is bounded by the
//! output: a hostile window size never allocates anything.

use super::CompressionType;
use bedplate_types::{Error, ErrorKind, Result};
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use zstd::zstd_safe::{self, CCtx, DCtx};

/// The window of deflate streams as a power of two: the specification's ("Compressed Clusters Descriptor"), and
/// QEMU's reader refuses a larger one.
const DEFLATE_WINDOW_BITS: u8 = 12;
/// The level at which zlib balances time and size.
const DEFLATE_LEVEL: u32 = 6;

fn corrupt(kind: CompressionType, why: impl std::fmt::Display) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!("a compressed cluster can't be expanded with {}: {why}", kind.name()),
    )
}

/// Expands `input` so that it fills `out` exactly.
///
/// # Errors
/// `Corrupt` when the data is damaged or holds less than `out`; `out` may be partly overwritten then.
pub fn decompress(kind: CompressionType, input: &[u8], out: &mut [u8]) -> Result<()> {
    match kind {
        CompressionType::Zlib => inflate(input, out),
        CompressionType::Zstd => unzstd(input, out),
    }
}

/// Packs clusters, one after another; keeps its tables between them.
pub struct Compressor(Method);

enum Method {
    Deflate(Box<Compress>),
    Zstd(CCtx<'static>),
}

impl Compressor {
    /// For an image's kind of compression.
    ///
    /// # Errors
    /// `Limit` without memory.
    pub fn new(kind: CompressionType) -> Result<Self> {
        Ok(Self(match kind {
            CompressionType::Zlib => Method::Deflate(Box::new(deflate_stream())),
            CompressionType::Zstd => {
                let context = CCtx::try_create()
                    .ok_or_else(|| Error::new(ErrorKind::Limit, "no memory for zstd"))?;
                Method::Zstd(context)
            }
        }))
    }

    /// The cluster packed, or `None` when that does not make it smaller.
    ///
    /// # Errors
    /// `Io` when the library fails.
    pub fn pack(&mut self, cluster: &[u8]) -> Result<Option<Vec<u8>>> {
        let failed = |why: &dyn std::fmt::Display| {
            Error::new(ErrorKind::Io, format!("a cluster can't be compressed: {why}"))
        };
        let mut out = vec![0; cluster.len().saturating_sub(1)];
        let len = match &mut self.0 {
            Method::Deflate(stream) => {
                stream.reset();
                match stream.compress(cluster, &mut out, FlushCompress::Finish) {
                    Ok(Status::StreamEnd) => usize::try_from(stream.total_out()).unwrap_or(0),
                    // Out of room. A stream that was not ended can't be used again: zlib-rs 0.6 does not forget how far
                    // its pending output has come, and panics when that meets the end of its buffer.
                    Ok(_) => {
                        **stream = deflate_stream();
                        return Ok(None);
                    }
                    Err(e) => return Err(failed(&e)),
                }
            }
            Method::Zstd(context) => match context.compress(&mut out[..], cluster, 0) {
                Ok(len) => len,
                Err(code) if code == too_small() => return Ok(None),
                Err(code) => return Err(failed(&zstd_safe::get_error_name(code))),
            },
        };
        out.truncate(len);
        Ok(Some(out))
    }
}

fn deflate_stream() -> Compress {
    Compress::new_with_window_bits(Compression::new(DEFLATE_LEVEL), false, DEFLATE_WINDOW_BITS)
}

/// What zstd returns when the output has no room.
fn too_small() -> usize {
    const DST_SIZE_TOO_SMALL: usize = 70;
    0_usize.wrapping_sub(DST_SIZE_TOO_SMALL)
}

fn inflate(input: &[u8], out: &mut [u8]) -> Result<()> {
    let kind = CompressionType::Zlib;
    let mut stream = Decompress::new(false);
    loop {
        let (read, written) = (stream.total_in(), stream.total_out());
        let rest_in = usize::try_from(read).ok().and_then(|n| input.get(n..)).unwrap_or(&[]);
        let rest_out =
            usize::try_from(written).ok().and_then(|n| out.get_mut(n..)).unwrap_or(&mut []);
        if rest_out.is_empty() {
            return Ok(());
        }
        let status = stream
            .decompress(rest_in, rest_out, FlushDecompress::Finish)
            .map_err(|e| corrupt(kind, e))?;
        if stream.total_out() == out.len() as u64 {
            return Ok(());
        }
        let stuck = stream.total_in() == read && stream.total_out() == written;
        if status == Status::StreamEnd || stuck {
            return Err(corrupt(kind, "the data ends before the cluster is full"));
        }
    }
}

/// One-shot per frame: unlike the streaming decoder it needs no window of the frame's choosing.
fn unzstd(input: &[u8], out: &mut [u8]) -> Result<()> {
    let kind = CompressionType::Zstd;
    let failed = |code| corrupt(kind, zstd_safe::get_error_name(code));
    let mut context =
        DCtx::try_create().ok_or_else(|| Error::new(ErrorKind::Limit, "no memory for zstd"))?;
    let (mut rest_in, mut rest_out) = (input, out);
    while !rest_out.is_empty() {
        let len = zstd_safe::find_frame_compressed_size(rest_in).map_err(failed)?;
        let (frame, after) =
            rest_in
                .split_at_checked(len)
                .filter(|(frame, _)| !frame.is_empty())
                .ok_or_else(|| corrupt(kind, "the data ends before the cluster is full"))?;
        let written = context.decompress(rest_out, frame).map_err(failed)?;
        rest_out = rest_out.get_mut(written..).unwrap_or(&mut []);
        rest_in = after;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn deflate(data: &[u8]) -> Vec<u8> {
        let mut c = flate2::Compress::new(flate2::Compression::fast(), false);
        let mut out = Vec::with_capacity(data.len() * 2 + 100);
        c.compress_vec(data, &mut out, flate2::FlushCompress::Finish).expect("room");
        out
    }

    fn zstd(data: &[u8]) -> Vec<u8> {
        ::zstd::bulk::compress(data, 3).expect("room")
    }

    fn sample(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i / 7 % 251) as u8).collect()
    }

    #[test]
    fn bytes_behind_the_stream_are_ignored() {
        let data = sample(65536);
        let streams =
            [(CompressionType::Zlib, deflate(&data)), (CompressionType::Zstd, zstd(&data))];
        for (kind, mut input) in streams {
            input.extend_from_slice(&[0xa5; 511]);
            let mut out = vec![0; data.len()];
            decompress(kind, &input, &mut out).expect("valid");
            assert_eq!(out, data);
        }
    }

    #[test]
    fn too_little_data_and_damage_are_errors() {
        let data = sample(4096);
        for (kind, input) in
            [(CompressionType::Zlib, deflate(&data)), (CompressionType::Zstd, zstd(&data))]
        {
            let mut out = vec![0; data.len() + 1];
            assert!(decompress(kind, &input, &mut out).is_err(), "a byte is missing");
            let mut out = vec![0; data.len()];
            assert!(decompress(kind, &input[..input.len() / 2], &mut out).is_err());
            assert!(decompress(kind, &[], &mut out).is_err());
            assert!(decompress(kind, &[0xff; 64], &mut out).is_err());
        }
    }

    fn noise(len: usize) -> Vec<u8> {
        let mut x = 1_u32;
        let step = |_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 24) as u8
        };
        (0..len).map(step).collect()
    }

    #[test]
    fn what_is_packed_unpacks_to_the_same() {
        for kind in [CompressionType::Zlib, CompressionType::Zstd] {
            let mut compressor = Compressor::new(kind).expect("memory");
            for len in [512, 4096, 65536, 2 << 20] {
                let mut data = sample(len);
                data[..len / 4].copy_from_slice(&noise(len / 4));
                let packed = compressor.pack(&data).expect("packs").expect("smaller");
                assert!(packed.len() < len / 2 + 64, "{} of {len}", packed.len());
                let mut out = vec![0; len];
                decompress(kind, &packed, &mut out).expect("valid");
                assert!(out == data);
            }
        }
    }

    #[test]
    fn what_would_not_become_smaller_is_not_packed() {
        for kind in [CompressionType::Zlib, CompressionType::Zstd] {
            let mut compressor = Compressor::new(kind).expect("memory");
            for _ in 0..20 {
                assert_eq!(compressor.pack(&noise(65536)).expect("no failure"), None);
            }
            // And the next one is not disturbed by them.
            let packed = compressor.pack(&sample(65536)).expect("packs").expect("smaller");
            let mut out = vec![0; 65536];
            decompress(kind, &packed, &mut out).expect("valid");
            assert_eq!(out, sample(65536));
        }
    }

    /// QEMU's reader gives up on a distance of more than 4096 bytes.
    #[test]
    fn deflate_streams_never_look_back_further_than_their_window() {
        let block = noise(8192);
        let data = [&block[..], &block[..]].concat();
        let mut compressor = Compressor::new(CompressionType::Zlib).expect("memory");
        // All that could be saved lies 8192 bytes back.
        assert_eq!(compressor.pack(&data).expect("no failure"), None);
        let near = [&block[..2048], &block[..2048]].concat();
        let packed = compressor.pack(&near).expect("packs").expect("smaller");
        let mut out = vec![0; near.len()];
        let mut small = Decompress::new_with_window_bits(false, DEFLATE_WINDOW_BITS);
        small.decompress(&packed, &mut out, FlushDecompress::Finish).expect("a small window does");
        assert_eq!(out, near);
    }

    #[test]
    fn several_zstd_frames_make_one_cluster() {
        let data = sample(8192);
        let mut input = zstd(&data[..5000]);
        input.extend(zstd(&data[5000..]));
        let mut out = vec![0; data.len()];
        decompress(CompressionType::Zstd, &input, &mut out).expect("valid");
        assert_eq!(out, data);
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(input: Vec<u8>, at: usize, byte: u8) {
            let mut out = [0; 512];
            for (kind, mut valid) in [(CompressionType::Zlib, deflate(&sample(512))), (CompressionType::Zstd, zstd(&sample(512)))] {
                let _ = decompress(kind, &input, &mut out);
                let n = valid.len();
                valid[at % n] = byte;
                let _ = decompress(kind, &valid, &mut out);
            }
        }
    }
}
