//! Random numbers that are the same everywhere for a seed: uniform, Zipf, and permutations without memory.
//!
//! Callers: the plans of requests ([`crate::plan`]), contents.

/// A small, fast generator (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator for this seed.
    pub fn new(seed: u64) -> Self {
        // Spread, so that neighbouring seeds differ in every bit; and never 0, from which there is no way on.
        Self(mix(seed) | 1)
    }

    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit` (0 for a limit of 0).
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// A number from 0 to below 1.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Fills a buffer.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        for piece in buffer.chunks_mut(8) {
            let bits = self.bits().to_le_bytes();
            piece.copy_from_slice(&bits[..piece.len()]);
        }
    }
}

/// Spreads a number over all 64 bits, one to one.
#[inline]
pub fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A random order of the numbers below a limit that needs no memory: steps that are each one to one on `bits` bits, repeated
/// while the result is not below the limit.
#[derive(Clone, Debug)]
pub struct Permutation {
    limit: u64,
    mask: u64,
    shift: u32,
    keys: [(u64, u64); 3],
}

impl Permutation {
    /// A random order of the numbers below `limit`, drawn from `random`.
    pub fn new(limit: u64, random: &mut Random) -> Self {
        let bits = (64 - limit.saturating_sub(1).leading_zeros()).max(2);
        let mask = u64::MAX >> (64 - bits);
        let keys = [(); 3].map(|()| (random.bits() | 1, random.bits()));
        Self { limit: limit.max(1), mask, shift: bits.div_ceil(2), keys }
    }

    /// The number at place `index`, which must be below the limit.
    #[inline]
    pub fn at(&self, index: u64) -> u64 {
        let mut x = index.min(self.limit - 1);
        loop {
            for (factor, term) in self.keys {
                x = x.wrapping_mul(factor).wrapping_add(term) & self.mask;
                x ^= x >> self.shift;
            }
            if x < self.limit {
                return x;
            }
        }
    }
}

/// Ranks by Zipf's law: rank k comes up in proportion to k to the power of -theta. Drawn by rejection from the inverse of the
/// integral (Hörmann and Derflinger 1996): no table, a constant time whatever the number of ranks.
#[derive(Clone, Debug)]
pub struct Zipf {
    theta: f64,
    ranks: f64,
    low: f64,
    high: f64,
    sure: f64,
}

impl Zipf {
    /// Over `ranks` ranks with the exponent `theta` (0: all alike).
    pub fn new(ranks: u64, theta: f64) -> Self {
        let mut zipf = Self { theta, ranks: ranks.max(1) as f64, low: 0.0, high: 0.0, sure: 0.0 };
        zipf.low = zipf.integral(1.5) - 1.0;
        zipf.high = zipf.integral(zipf.ranks + 0.5);
        zipf.sure = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.weight(2.0));
        zipf
    }

    fn weight(&self, x: f64) -> f64 {
        (-self.theta * x.ln()).exp()
    }

    fn integral(&self, x: f64) -> f64 {
        let t = (1.0 - self.theta) * x.ln();
        // (e^t - 1) / t, which is 1 at 0, where the exponent is 1.
        let factor = if t.abs() > 1e-8 { t.exp_m1() / t } else { 1.0 + t / 2.0 };
        factor * x.ln()
    }

    fn inverse(&self, y: f64) -> f64 {
        let t = (y * (1.0 - self.theta)).max(-1.0);
        let factor = if t.abs() > 1e-8 { t.ln_1p() / t } else { 1.0 - t / 2.0 };
        (factor * y).exp()
    }

    /// A rank from 0 on; 0 comes up most.
    pub fn draw(&self, random: &mut Random) -> u64 {
        loop {
            let y = self.high + random.unit() * (self.low - self.high);
            let x = self.inverse(y);
            let rank = x.round().clamp(1.0, self.ranks);
            if rank - x <= self.sure || y >= self.integral(rank + 0.5) - self.weight(rank) {
                return rank as u64 - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_has_every_number_once_in_another_order() {
        for limit in [1, 2, 3, 5, 64, 1000, 4097] {
            let order = Permutation::new(limit, &mut Random::new(limit));
            let mut all: Vec<u64> = (0..limit).map(|i| order.at(i)).collect();
            assert!(limit < 64 || !all.is_sorted());
            let in_place = all.iter().zip(0..).filter(|(a, b)| **a == *b).count();
            assert!(limit < 64 || in_place < 16, "{in_place} of {limit} stayed");
            all.sort_unstable();
            assert!(all.into_iter().eq(0..limit));
        }
    }

    #[test]
    fn neighbours_in_a_permutation_lie_apart() {
        let order = Permutation::new(1 << 20, &mut Random::new(3));
        let near = (1..10_000).filter(|&i| order.at(i).abs_diff(order.at(i - 1)) < 1024).count();
        // By chance 20 of 10000.
        assert!(near < 100, "{near}");
    }

    #[test]
    fn zipf_ranks_come_up_by_their_weights() {
        for theta in [0.0, 0.5, 1.0, 1.2] {
            let (zipf, mut random) = (Zipf::new(1000, theta), Random::new(7));
            let mut counts = vec![0_u32; 1000];
            for _ in 0..200_000 {
                counts[zipf.draw(&mut random) as usize] += 1;
            }
            let all: f64 = (1..=1000).map(|k| f64::from(k).powf(-theta)).sum();
            for rank in [0, 1, 9] {
                let wanted = 200_000.0 * f64::from(rank + 1).powf(-theta) / all;
                let got = f64::from(counts[rank as usize]);
                let apart = (got - wanted).abs();
                assert!(apart < 5.0 * wanted.sqrt() + 1.0, "{theta} {rank}: {got} for {wanted}");
            }
        }
    }
}
