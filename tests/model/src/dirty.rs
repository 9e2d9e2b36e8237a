//! What a persistent bitmap in an image says, read from its bytes, and whether that is true.

use bedplate_qcow2::format::{Bitmap, BitmapExtension, EXT_BITMAPS, Geometry};
use bedplate_qcow2::read_header;
use bedplate_sim::exec::block_on;
use bedplate_sim::{Image, SimOptions, SimStorage};

/// The set bits of a bitmap, as one truth value for each grain.
fn grains(image: &Image, bitmap: &Bitmap, size: u64, geo: Geometry) -> Result<Vec<bool>, String> {
    let count = size.div_ceil(1 << bitmap.granularity_bits) as usize;
    let cluster = geo.cluster_size() as usize;
    let mut out = Vec::new();
    for i in 0..u64::from(bitmap.table_size) {
        let mut raw = [0; 8];
        image.read(bitmap.table_offset.get() + i * 8, &mut raw);
        let raw = u64::from_be_bytes(raw);
        let mut bytes = vec![if raw & 1 != 0 { 0xff } else { 0 }; cluster];
        let host = Bitmap::table_entry(raw, geo).map_err(|e| format!("a bitmap's table: {e}"))?;
        if let Some(host) = host {
            image.read(host.get(), &mut bytes);
        }
        out.extend(bytes.iter().flat_map(|b| (0..8).map(move |bit| b >> bit & 1 != 0)));
    }
    if out.len() < count {
        return Err("a bitmap's table is too short".to_owned());
    }
    out.truncate(count);
    Ok(out)
}

/// The image's only bitmap must know of every difference between `base` and `content`, unless it says that it can't be
/// trusted; with `trusted` it may not say so. Without `base` there must be none.
pub(crate) fn check_bitmap(
    image: &Image,
    content: &[u8],
    base: Option<&[u8]>,
    trusted: bool,
) -> Result<(), String> {
    let options = SimOptions { read_only: true, ..SimOptions::default() };
    let storage = SimStorage::from_image(image.clone(), options);
    let header = block_on(read_header(&storage)).map_err(|e| format!("{e:#}"))?;
    let data = header.extension(EXT_BITMAPS).filter(|_| header.bitmaps_valid());
    let (data, base) = match (data, base) {
        (None, None) => return Ok(()),
        (None, Some(_)) if !trusted => return Ok(()),
        (None, Some(_)) => return Err("the bitmap is gone".to_owned()),
        (Some(_), None) => return Err("there is a bitmap".to_owned()),
        (Some(data), Some(base)) => (data, base),
    };
    let geo = header.geometry().map_err(|e| e.to_string())?;
    let ext = BitmapExtension::parse(data, geo).map_err(|e| e.to_string())?;
    let mut directory = vec![0; ext.directory_size as usize];
    image.read(ext.directory_offset.get(), &mut directory);
    let list = ext.parse_directory(&directory, geo).map_err(|e| e.to_string())?;
    let [bitmap] = list.as_slice() else { return Err(format!("{} bitmaps", list.len())) };
    if bitmap.in_use() {
        return if trusted { Err("the bitmap can't be trusted".to_owned()) } else { Ok(()) };
    }
    let grain = 1usize << bitmap.granularity_bits;
    let set = grains(image, bitmap, content.len() as u64, geo)?;
    for (i, (now, then)) in content.chunks(grain).zip(base.chunks(grain)).enumerate() {
        if now != then && !set[i] {
            return Err(format!(
                "the bitmap does not know of the change at {:#x} (granularity {grain})",
                i * grain
            ));
        }
    }
    Ok(())
}
