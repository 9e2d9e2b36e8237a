//! The corpus that fuzzing keeps: hostile and sound images, each a regression test.

use anyhow::{Result, ensure};
use bedplate_model::fuzz;
use bedplate_tests::paths;

fn each(target: &str, mut run: impl FnMut(&[u8])) -> Result<()> {
    let mut seen = 0;
    for entry in std::fs::read_dir(paths::workspace().join("fuzz/corpus").join(target))? {
        run(&std::fs::read(entry?.path())?);
        seen += 1;
    }
    ensure!(seen > 0, "there is no corpus");
    Ok(())
}

#[test]
fn images_of_the_corpus_are_opened_and_looked_through_without_a_change() -> Result<()> {
    each("open", fuzz::open)
}

#[test]
fn images_of_the_corpus_are_worked_with_without_a_panic() -> Result<()> {
    each("work", fuzz::work)
}

#[test]
fn images_of_the_corpus_are_checked_and_repaired_to_what_the_repair_says() -> Result<()> {
    each("check", fuzz::examine)
}
