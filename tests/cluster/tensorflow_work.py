"""What ranks of a TFJob do. Only TensorFlow is there for certain."""

import json
import os

import kale_dist as kd


def mirrored():
    """Each process has a copy of the variables; their gradients are added up."""
    import tensorflow as tf

    config = json.loads(os.environ["TF_CONFIG"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    x = tf.random.stateless_uniform([64, 4], [0, 1])
    y = tf.reduce_sum(x, 1, keepdims=True)
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(16))
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch):
        def replica(inputs, wanted):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(inputs) - wanted) ** 2) / 16
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(replica, args=batch), axis=None)

    batches = iter(data)
    losses = [float(step(next(batches))) for _ in range(30)]
    kd.report(loss=losses[-1])
    return config["task"], strategy.num_replicas_in_sync, losses[0], losses[-1], model.get_weights()[0].ravel().tolist()


def served():
    """The chief hands out steps to the workers; the variables lie on the parameter servers."""
    import tensorflow as tf

    print("I am", json.loads(os.environ["TF_CONFIG"])["task"], flush=True)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        ).join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([4, 1]))

    @tf.function
    def step(seed):
        x = tf.random.stateless_uniform([32, 4], [seed, 1])
        y = tf.reduce_sum(x, 1, keepdims=True)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(x, weights) - y) ** 2)
        weights.assign_sub(0.3 * tape.gradient(loss, weights))
        return loss

    for seed in range(100):
        last = coordinator.schedule(step, args=(tf.constant(seed),))
    coordinator.join()
    return weights.device, float(last.fetch()), weights.numpy().ravel().tolist()
