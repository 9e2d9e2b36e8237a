//! How loads are written on the command line.

use bedplate_bench::{Mix, Op, Pattern, SizeShare, Sizes};
use bedplate_types::{Error, ErrorKind, Result, parse_size};

fn bad(text: String) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

fn percent(text: &str) -> Result<u8> {
    let number = text.trim_end_matches('%').parse::<u8>().ok().filter(|n| *n <= 100);
    number.ok_or_else(|| bad(format!("'{text}' is not a percentage from 0 to 100")))
}

/// Reads `read`, `write`, `trim`, `flush`, or shares as `read=70,write=30`.
pub fn mix(text: &str) -> Result<Mix> {
    let mut mix = Mix { read: 0, write: 0, trim: 0, flush: 0 };
    for word in text.split(',') {
        let (name, share) = match word.split_once('=') {
            Some((name, share)) => (name, percent(share)?),
            None => (word, 100),
        };
        let known = Op::ALL.into_iter().find(|op| op.name() == name);
        let known = known.ok_or_else(|| {
            bad(format!("'{name}' is none of read, write, trim and flush (write read=70,write=30)"))
        })?;
        *match known {
            Op::Read => &mut mix.read,
            Op::Write => &mut mix.write,
            Op::Trim => &mut mix.trim,
            Op::Flush => &mut mix.flush,
        } = share;
    }
    Ok(mix)
}

/// Reads `random`, `sequential`, `zipf[:THETA]` or `hot-cold:SPACE/LOAD`.
pub fn pattern(text: &str) -> Result<Pattern> {
    let (name, rest) = match text.split_once(':') {
        Some((name, rest)) => (name, Some(rest)),
        None => (text, None),
    };
    match (name, rest) {
        ("random", None) => Ok(Pattern::Random),
        ("sequential", None) => Ok(Pattern::Sequential),
        ("zipf", theta) => {
            let theta = theta.unwrap_or("1.2");
            let theta = theta.parse().map_err(|_| bad(format!("'{theta}' is no exponent")))?;
            Ok(Pattern::Zipf { theta })
        }
        ("hot-cold", Some(shares)) => {
            let (space, load) = shares.split_once('/').ok_or_else(|| {
                bad(format!(
                    "'{shares}' is not SPACE/LOAD, as in 10/90: 10 % of the space gets 90 %"
                ))
            })?;
            Ok(Pattern::HotCold { space: percent(space)?, load: percent(load)? })
        }
        _ => Err(bad(format!(
            "'{text}' is none of random, sequential, zipf:THETA and hot-cold:SPACE/LOAD"
        ))),
    }
}

/// Reads `4K`, `4K-64K`, or `4K:70,64K:30`.
pub fn sizes(text: &str) -> Result<Sizes> {
    if text.contains(':') {
        let part = |word: &str| {
            let (size, share) = word
                .split_once(':')
                .ok_or_else(|| bad(format!("'{word}' is not SIZE:PERCENT, as in 4K:70,64K:30")))?;
            Ok(SizeShare { bytes: parse_size(size)?.get(), percent: percent(share)? })
        };
        return Ok(Sizes::Split { parts: text.split(',').map(part).collect::<Result<_>>()? });
    }
    match text.split_once('-') {
        Some((min, max)) => {
            Ok(Sizes::Range { min: parse_size(min)?.get(), max: parse_size(max)?.get() })
        }
        None => Ok(Sizes::Fixed { bytes: parse_size(text)?.get() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_read_as_they_are_written() {
        assert_eq!(mix("write").expect("a mix"), Mix::WRITE);
        let mixed = Mix { read: 65, write: 30, trim: 0, flush: 5 };
        assert_eq!(mix("read=65,write=30%,flush=5").expect("a mix"), mixed);
        assert_eq!(pattern("zipf:0.9").expect("a pattern"), Pattern::Zipf { theta: 0.9 });
        let hot = Pattern::HotCold { space: 10, load: 90 };
        assert_eq!(pattern("hot-cold:10/90").expect("a pattern"), hot);
        assert_eq!(sizes("4K-1M").expect("sizes"), Sizes::Range { min: 4096, max: 1 << 20 });
        let parts =
            vec![SizeShare { bytes: 4096, percent: 70 }, SizeShare { bytes: 65536, percent: 30 }];
        assert_eq!(sizes("4K:70,64K:30").expect("sizes"), Sizes::Split { parts });
        for wrong in ["", "reads", "read=101", "read=x"] {
            assert!(mix(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "hot-cold", "hot-cold:90", "zipf:x", "random:1"] {
            assert!(pattern(wrong).is_err(), "{wrong}");
        }
        assert!(sizes("4K:").is_err() && sizes("4K-").is_err() && sizes("x").is_err());
    }
}
