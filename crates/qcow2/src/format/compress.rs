//! Decompression of compressed clusters.
//!
//! Callers: the engine's read path. A cluster always expands to exactly the cluster size. The input's length
//! is rounded up to sectors, so bytes behind the stream are ignored. Memory is bounded by the output: a
//! hostile window size never allocates anything.

use super::CompressionType;
use bedplate_types::{Error, ErrorKind, Result};
use flate2::{Decompress, FlushDecompress, Status};
use zstd::zstd_safe::{self, DCtx};

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
