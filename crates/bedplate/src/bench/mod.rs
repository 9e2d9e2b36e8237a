//! `bedplate bench`: measuring disks.

mod run;
mod words;

use crate::failure::Failure;
use clap::{Args, Subcommand};
use std::process::ExitCode;

/// Measure a disk, whoever serves it
///
/// The same loads run on files and devices, on exports over vhost-user-blk (without a virtual machine) and over NBD, so that
/// their speed can be compared.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  bedplate bench run /dev/nvme0n1
  bedplate bench run vhost-user-blk:/run/vm.sock --mix read=70,write=30 --destroy /run/vm.sock")]
pub struct BenchArgs {
    #[command(subcommand)]
    verb: BenchVerb,
}

#[derive(Subcommand, Debug)]
enum BenchVerb {
    Run(Box<run::RunArgs>),
}

pub fn run(args: BenchArgs) -> Result<ExitCode, Failure> {
    match args.verb {
        BenchVerb::Run(args) => run::run(&args),
    }
}
