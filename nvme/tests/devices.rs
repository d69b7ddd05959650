//! The driver on the model of a controller keeps the promises of block devices, by the cases of
//! every device.

#[path = "../../block/tests/cases/mod.rs"]
mod cases;

use cases::BLOCKS;
use defuse_block::model::SsdParameters;
use defuse_block::{BlockDevice, RamDevice, SimDevice};
use defuse_nvme::model::ModelProperties;
use defuse_nvme::{ControllerModel, NvmeDevice, NvmeOptions};

device_cases!(run_on_each);

/// Runs `case` on controllers of all shapes.
fn run_on_each(case: impl Fn(&str, &dyn BlockDevice)) {
    let bare = ModelProperties {
        maps: false,
        interrupts: false,
        writes_zeroes: false,
        mdts: 9,
        queues: 2,
        ..ModelProperties::default()
    };
    let shapes = [
        (
            "a controller that reaches all memory",
            ModelProperties { mdts: 0, ..ModelProperties::default() },
        ),
        (
            "one with scatter gather lists",
            ModelProperties { sgl: true, mdts: 9, ..ModelProperties::default() },
        ),
        (
            "one with an SSD",
            ModelProperties {
                parts: Some(SsdParameters::default()),
                mdts: 9,
                ..ModelProperties::default()
            },
        ),
        ("one that reaches its own memory only", bare),
    ];
    for (name, shape) in shapes {
        let model = ControllerModel::with(&RamDevice::new(4096, BLOCKS), 1, shape).unwrap();
        case(name, &NvmeDevice::open(model, &NvmeOptions::default()).unwrap());
    }
    let model = ControllerModel::with(
        &SimDevice::new(BLOCKS, 1),
        1,
        ModelProperties { mdts: 9, ..ModelProperties::default() },
    );
    case(
        "one over a simulation",
        &NvmeDevice::open(model.unwrap(), &NvmeOptions::default()).unwrap(),
    );
}
