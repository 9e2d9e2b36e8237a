//! AES in XTS mode over sectors of 512 bytes (IEEE 1619), on the processor's AES instructions where it has them.
//!
//! Callers: [`super::Cipher`] for data, [`super::keys`] for key material. The block cipher is a library's; the mode is
//! here so that many blocks are under way at once.

use crate::format::LuksIv;
use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes256, Block};
use bedplate_types::{Error, ErrorKind, Result};

/// Bytes of a sector, the unit that has a number.
pub(crate) const SECTOR: usize = 512;
/// Bytes of a block of the cipher.
const BLOCK: usize = 16;
/// Sectors whose numbers are encrypted together.
const TOGETHER: usize = 16;

/// A pair of keys: for the data, and for the sectors' numbers.
enum Keys {
    Aes128(Box<(Aes128, Aes128)>),
    Aes256(Box<(Aes256, Aes256)>),
}

/// The cipher with its keys, which are overwritten when it is dropped.
pub(crate) struct Xts {
    keys: Keys,
    iv: LuksIv,
}

/// Which way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Encrypt,
    Decrypt,
}

impl Xts {
    /// The cipher for a key: half for the data, half for the sectors' numbers.
    ///
    /// # Errors
    /// `BadImage` for a key that has not 32 or 64 bytes.
    pub(crate) fn new(key: &[u8], iv: LuksIv) -> Result<Self> {
        // A key of an odd length gives halves of different lengths, one of which is refused.
        let (data, tweak) = key.split_at(key.len() / 2);
        let bad =
            |_| Error::new(ErrorKind::BadImage, "the key of the encryption has a wrong length");
        let keys = if data.len() == 16 {
            let (data, tweak) = (Aes128::new_from_slice(data), Aes128::new_from_slice(tweak));
            Keys::Aes128(Box::new((data.map_err(bad)?, tweak.map_err(bad)?)))
        } else {
            let (data, tweak) = (Aes256::new_from_slice(data), Aes256::new_from_slice(tweak));
            Keys::Aes256(Box::new((data.map_err(bad)?, tweak.map_err(bad)?)))
        };
        Ok(Self { keys, iv })
    }

    /// Encrypts whole sectors, the first of which has the number `first`. What is behind the last whole one stays.
    pub(crate) fn encrypt(&self, first: u64, data: &mut [u8]) {
        self.run(Way::Encrypt, first, data);
    }

    /// Decrypts whole sectors.
    pub(crate) fn decrypt(&self, first: u64, data: &mut [u8]) {
        self.run(Way::Decrypt, first, data);
    }

    fn run(&self, way: Way, first: u64, data: &mut [u8]) {
        match &self.keys {
            Keys::Aes128(keys) => run(&keys.0, &keys.1, self.iv, way, first, data),
            Keys::Aes256(keys) => run(&keys.0, &keys.1, self.iv, way, first, data),
        }
    }
}

fn run<C>(data_key: &C, tweak_key: &C, iv: LuksIv, way: Way, first: u64, data: &mut [u8])
where
    C: BlockCipherEncrypt
        + BlockCipherDecrypt
        + aes::cipher::BlockSizeUser<BlockSize = aes::cipher::consts::U16>,
{
    let mut number = first;
    for piece in data.chunks_mut(SECTOR * TOGETHER) {
        let mut tweaks = [Block::default(); TOGETHER];
        for tweak in &mut tweaks {
            let n = match iv {
                LuksIv::Plain => number & u64::from(u32::MAX),
                LuksIv::Plain64 => number,
            };
            *tweak = u128::from(n).to_le_bytes().into();
            number = number.wrapping_add(1);
        }
        tweak_key.encrypt_blocks(&mut tweaks);
        for (sector, tweak) in piece.chunks_exact_mut(SECTOR).zip(&tweaks) {
            let powers = powers(u128::from_le_bytes((*tweak).into()));
            let (blocks, _) = Block::slice_as_chunks_mut(sector);
            mask(blocks, &powers);
            match way {
                Way::Encrypt => data_key.encrypt_blocks(blocks),
                Way::Decrypt => data_key.decrypt_blocks(blocks),
            }
            mask(blocks, &powers);
        }
    }
}

/// The tweak of each block of a sector: the first, times x in the field of 2^128 elements again and again.
fn powers(first: u128) -> [u128; SECTOR / BLOCK] {
    let mut tweak = first;
    [(); SECTOR / BLOCK].map(|()| {
        let this = tweak;
        let carry = if tweak >> 127 == 1 { 0x87 } else { 0 };
        tweak = (tweak << 1) ^ carry;
        this
    })
}

fn mask(blocks: &mut [Block], masks: &[u128; SECTOR / BLOCK]) {
    for (block, mask) in blocks.iter_mut().zip(masks) {
        let masked = u128::from_le_bytes((*block).into()) ^ mask;
        *block = masked.to_le_bytes().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
        (0..text.len()).step_by(2).map(digit).collect()
    }

    fn counting() -> Vec<u8> {
        (0..512).map(|i| i as u8).collect()
    }

    /// Annex B of IEEE 1619-2007 encrypts 00 01 02 ... in sectors of 512 bytes: vector 4 (AES-128), 10 and 12 to 14
    /// (AES-256).
    #[test]
    fn sectors_are_encrypted_as_the_standard_says() {
        const E: &str = "2718281828459045235360287471352662497757247093699959574966967627";
        const PI: &str = "3141592653589793238462643383279502884197169399375105820974944592";
        let key_128 = "2718281828459045235360287471352631415926535897932384626433832795";
        let key_256 = [E, PI].concat();
        for (key, sector, start, end) in [
            (
                key_128,
                0,
                "27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89c",
                "eb4a427d1923ce3ff262735779a418f20a282df920147beabe421ee5319d0568",
            ),
            (
                &key_256,
                0xff,
                "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b",
                "773dad38014bd2092fa755c824bb5e54c4f36ffda9fcea70b9c6e693e148c151",
            ),
            (
                &key_256,
                0xffff,
                "77a31251618a15e6b92d1d66dffe7b50b50bad552305ba0217a610688eff7e11",
                "54fbff89eeaeea791f4a7ab1f9868294a4f9e27b42af8100cb9d59cef9645803",
            ),
            (
                &key_256,
                0xff_ffff_ffff,
                "64497e5a831e4a932c09be3e5393376daa599548b816031d224bbf50a818ed23",
                "6975be5e0b4efce51cd3e70c25a1fbbbd609d273ad5b0d59631c531f6a0a57b9",
            ),
        ] {
            let xts = Xts::new(&hex(key), LuksIv::Plain64).expect("a key");
            let mut data = counting();
            xts.encrypt(sector, &mut data);
            assert_eq!((&data[..32], &data[480..]), (&hex(start)[..], &hex(end)[..]));
            xts.decrypt(sector, &mut data);
            assert_eq!(data, counting());
        }
    }

    #[test]
    fn many_sectors_are_each_encrypted_by_their_own_number() {
        let xts = Xts::new(&[7; 64], LuksIv::Plain64).expect("a key");
        let first = u64::from(u32::MAX) - 5;
        let mut all = counting().repeat(TOGETHER * 2 + 3);
        xts.encrypt(first, &mut all);
        for (sector, number) in all.chunks(SECTOR).zip(first..) {
            let mut one = counting();
            xts.encrypt(number, &mut one);
            assert_eq!(sector, one);
        }
        let plain = Xts::new(&[7; 64], LuksIv::Plain).expect("a key");
        let (mut one, mut two) = (counting(), counting());
        plain.encrypt(3, &mut one);
        plain.encrypt(3 + (1 << 32), &mut two);
        assert_eq!(one, two, "only 32 bits count");
    }

    #[test]
    fn keys_of_other_lengths_are_refused() {
        for len in [0, 16, 31, 33, 48, 63, 65, 128] {
            assert!(Xts::new(&vec![0; len], LuksIv::Plain64).is_err(), "{len} bytes");
        }
    }
}
